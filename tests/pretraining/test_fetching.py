"""fetching.py: images by URL: what is tried again, one deadline for all of a fetch, and no barrier between chunks."""

import time

import pytest
from conftest import noise_png
from raw_files import write_parquet
from test_loader import load, make_loader, reasons

from common.images import BadImage
from pretraining import fetching
from pretraining.fetching import Fetcher, Later
from pretraining.raw_data import list_sources
from pretraining.rows import read_rows


@pytest.fixture
def fetch(web, tmp_path, monkeypatch):
    """Load rows of paths of the web server; return (the chunk, {path: times asked for}, seconds)."""
    monkeypatch.setattr(fetching, "WAIT", 0.01)

    def call(*paths, **options):
        web.hits.clear()
        urls = [path if "://" in path else f"{web.address}/{path}" for path in paths]
        write_parquet(tmp_path / "x.parquet", urls, ["x"] * len(urls), image_column="URL")
        began = time.monotonic()
        chunk = load(tmp_path, make_loader(**options))
        return chunk, {path: web.hits.count(f"/{path}") for path in paths}, time.monotonic() - began

    return call


def fetch_one(url, timeout=5.0, retries=0):
    with Fetcher(timeout, retries) as fetcher:
        return fetcher.fetch(url).result()


def test_images_are_fetched_by_url(fetch):
    chunk, hits, _ = fetch("good", "moved", "good/a%20b.png?size=1&sig=a%2Fb%2C")
    assert len(chunk["keys"]) == 3 and hits == {"good": 2, "moved": 1, "good/a%20b.png?size=1&sig=a%2Fb%2C": 1}


def test_a_url_with_spaces_or_letters_of_other_languages_is_quoted(web):
    assert fetch_one(f"{web.address}/good/a café.png") == noise_png(len("/good/a%20caf%C3%A9.png"))
    assert web.hits == ["/good/a%20caf%C3%A9.png"]


def test_what_may_pass_is_tried_again_and_what_will_not_is_not(fetch):
    chunk, hits, _ = fetch("404", "500", "429", "flaky", "cut", "chunks", "babble", "loop")
    assert hits == {"404": 1, "500": 3, "429": 3, "flaky": 2, "cut": 3, "chunks": 3, "babble": 3, "loop": 10}
    found = reasons(chunk)
    assert [key.rpartition(":")[2] for key in chunk["keys"]] == ["3"]
    assert all(f"HTTP {code}" in found[row] for row, code in enumerate([404, 500, 429]))
    assert "cut short by 300 bytes" in found[4] and all("cannot be fetched" in reason for reason in found.values())
    assert "HTTP 302: too many redirects" in found[7]


def test_urls_that_are_none_are_bad_rows(fetch, web):
    odd = ["http://", "http://[::1/x", "http://127.0.0.1:x/", "https://127.0.0.1:1/x", f"http://{'x' * 300}.invalid/"]
    chunk, _, _ = fetch(*odd, f"{web.address.replace('http', 'https')}/good", retries=1)
    assert len(reasons(chunk)) == len(odd) + 1, chunk["captions"]


@pytest.mark.parametrize("kind", ["silent", "headers_drip", "drip", "slow-loop"])
def test_one_deadline_holds_for_all_of_a_fetch(fetch, kind):
    chunk, hits, seconds = fetch(kind, timeout=0.5, retries=1)
    assert hits[kind] == (hits[kind] if kind == "slow-loop" else 1) and 0.4 < seconds < 3
    assert ("slower than 0.5 s" if kind == "drip" else "timed out") in reasons(chunk)[0]


def test_a_file_that_is_too_large_is_left(fetch, monkeypatch):
    monkeypatch.setattr(fetching, "LARGEST_FILE", 1000)
    chunk, hits, _ = fetch("good")
    assert "more than" in reasons(chunk)[0] and hits == {"good": 1}


def test_a_server_says_how_long_to_wait(web):
    began = time.monotonic()
    assert fetch_one(f"{web.address}/busy/1", retries=1) and time.monotonic() - began > 0.95
    web.retry_after, began = 3600, time.monotonic()
    with pytest.raises(Later, match="HTTP 503"):
        fetch_one(f"{web.address}/busy/2", retries=1)
    assert web.hits.count("/busy/2") == 1 and time.monotonic() - began < 1


@pytest.mark.parametrize(("path", "passes"), [("404", False), ("503", True), ("silent", True), ("cut", True)])
def test_failures_that_may_pass_are_told_from_those_that_will_not(web, path, passes):
    with pytest.raises(BadImage) as error:
        fetch_one(f"{web.address}/{path}", timeout=0.3)
    assert isinstance(error.value, Later) == passes


def test_reasons_hold_no_secrets(fetch, web):
    secret = web.address.replace("//", "//me:password@")
    chunk, _, _ = fetch(f"{secret}/404?X-Amz-Signature=abc", "http://me:password@[x/?access_token=abc")
    assert len(reasons(chunk)) == 2 and not any(word in str(reasons(chunk)) for word in ("password", "abc"))
    chunk, _, _ = fetch(f"{secret}/text?X-Amz-Signature=abc&sig=abc")
    assert "not an image" in reasons(chunk)[0] and not any(word in str(reasons(chunk)) for word in ("password", "abc"))


def test_hanging_rows_hold_no_other_chunk(web, tmp_path):
    """Every eighth of 64 rows hangs for a second: one after the other, the chunks of eight would take eight."""
    urls = [f"{web.address}/{'silent' if row % 8 == 3 else 'good'}/{row}" for row in range(64)]
    write_parquet(tmp_path / "x.parquet", urls, ["x"] * 64, image_column="URL")
    (source,) = list_sources(str(tmp_path))
    rows, began = list(read_rows(source, 0, 64)), time.monotonic()
    batches = [(range(first, first + 8), rows[first : first + 8]) for first in range(0, 64, 8)]
    chunks = list(make_loader(timeout=1).load_all(source, batches))
    assert time.monotonic() - began < 3
    numbers = [int(key.rpartition(":")[2]) for chunk in chunks for key in chunk["keys"]]
    assert numbers == [row for row in range(64) if row % 8 != 3]


def test_what_is_not_wanted_any_more_is_given_up(web, tmp_path):
    urls = [f"{web.address}/{kind}" for kind in ("good", "silent")]
    write_parquet(tmp_path / "x.parquet", urls, ["x"] * 2, image_column="URL")
    (source,) = list_sources(str(tmp_path))
    batches = [([number], [row]) for number, row in enumerate(read_rows(source, 0, 2))]
    chunks = make_loader(timeout=30).load_all(source, batches)
    began = time.monotonic()
    assert next(chunks)["keys"]
    chunks.close()
    assert time.monotonic() - began < 5
