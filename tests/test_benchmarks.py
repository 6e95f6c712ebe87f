"""What the measurements calculate, against numbers worked by hand; the measurements themselves are no tests."""

import json

import numpy as np
import psutil
import pytest

from benchmarks import cost, measuring, older_libraries, plain_diffusers, scaling


def test_a_ring_sends_nearly_twice_the_gradients():
    seconds, sent = scaling.average_seconds(workers=4, weights=1000, bytes_each=4, bytes_a_second=3000, hop=0.5)
    assert sent == 2 * 3 / 4 * 4000 == 6000
    assert seconds == 6000 / 3000 + 2 * 3 * 0.5  # of one bucket


def test_efficiency_by_hand():
    common = {"weights": 1000, "wire": 4000, "hop": 0.0}  # two workers average in a second, many in nearly two
    assert scaling.efficiency(1, 3.0, **common) == 1
    assert scaling.efficiency(2, 3.0, **common) == 3 / 4
    assert scaling.efficiency(2, 3.0, **common, batches=3) == 9 / 10
    assert scaling.efficiency(2, 3.0, **common, bytes_each=2) == 3 / 3.5
    assert scaling.efficiency(2, 3.0, **common, hides=0.25) == 3 / 3.25
    assert scaling.efficiency(2, 3.0, **common, hides=0.5) == 1
    assert scaling.efficiency(10**6, 3.0, **common) == pytest.approx(3 / 5, rel=1e-5)


def test_the_fit_finds_what_the_numbers_were_made_of():
    """A step of 0.1 s and 0.4 s a pair; two workers wait for 0.5 s more, in which 1000 gradients travel."""
    medians = {f"1 workers of {pairs} pairs": 1 / (0.1 + 0.4 * pairs) for pairs in scaling.PAIRS}
    medians |= {f"2 workers of {pairs} pairs": 1 / (0.6 + 0.4 * pairs) for pairs in scaling.PAIRS}
    assert scaling.fit(medians, 1000) == pytest.approx((0.1, 0.4, 8000))


COST = """
    --rows 72000 --samples 72000 14400 --load_rate 1 --encode_rates 10 5 --train_rates 2.5 1 --shared_factor 1.5
    --cpus 20 --encoders 2 --trainers 4 --cpu_price 1 --encoder_price 2 --trainer_price 3
    --row_bytes 73e6 --storage_price 10
""".split()  # noqa: SIM905


def test_cost_by_hand(capsys):
    """A second: 20 rows are loaded; 20 encoded at 256 pixels, 10 at 512, 20 / 3 at both; 10 and 4 trained on."""
    cost.main(cost.parse_args(COST))
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = printed["strategies"]
    stored = 72000 * 73e6 / 1e12 * 10 * 6 / 730  # 5.256 TB for 6 hours
    offline = [[3, 3 * (20 + 4)], [2, 2 * 12], [1, 12], [0, stored]]  # the encoders take 3 hours, the CPUs 1
    online = [[2, 2 * (20 + 4 + 12)], [1, 20 + 4 + 12]]
    shared = [[3, 3 * (20 + 12)], [1.5, 1.5 * (20 + 12)]]
    for name, expected in {"offline": offline, "online": online, "shared": shared}.items():
        steps = [[step["hours"], step["dollars"]] for step in found[name]["steps"]]
        assert np.array(steps) == pytest.approx(np.array(expected)), name
    assert found["offline"]["dollars"] == pytest.approx(72 + 24 + 12 + 0.432)
    assert [each["trainer_hours"] for each in found.values()] == pytest.approx([3 * 4, 3 * 4, 4.5 * 4])
    assert found["online"]["steps"][1]["busy"] == pytest.approx({"cpus": 0.2, "encoders": 0.4, "trainers": 1})
    assert found["offline"]["steps"][0]["slowest"] == "encoders"
    assert {each["source"] for each in printed["assumed"].values()} == {"given"}


@pytest.mark.parametrize("gpus", cost.UNET)
def test_what_was_published_follows_from_its_rates(gpus):
    """Days and dollars of MosaicML's table are those of its images/s and its price, 2 dollars an hour."""
    *rates, days, dollars = cost.UNET[gpus]
    samples, _ = cost.DEFAULTS["samples"]
    fleet = {"trainers": cost.Machines(gpus, 2)}
    steps = [
        cost.run_step("train", rows, {"trainers": rate / gpus}, fleet)
        for rows, rate in zip(samples, rates, strict=True)
    ]
    assert sum(step["hours"] for step in steps) / 24 == pytest.approx(days, abs=0.005)
    assert sum(step["dollars"] for step in steps) == pytest.approx(dollars, abs=30)


def test_a_default_of_the_cost_says_whose_it_is(capsys):
    needed = [word for word in COST if word.startswith("--") and word[2:] not in cost.DEFAULTS]
    words = [each for flag in needed for each in ([flag, "1", "1"] if flag.endswith("rates") else [flag, "1"])]
    cost.main(cost.parse_args(words))
    printed = capsys.readouterr().out
    assumed = json.loads(printed.splitlines()[-1])["assumed"]
    assert {name for name, each in assumed.items() if each["source"] != "given"} == cost.DEFAULTS.keys()
    assert all(f"--{name} " in printed and each["source"] in printed for name, each in assumed.items())
    assert assumed["row_bytes"]["value"] == 2 * (2 * 4 * 32 * 32 + 2 * 4 * 64 * 64 + 77 * 1024) == 239_616


def test_a_script_is_followed_to_a_step_and_no_further(tmp_path):
    log, script = tmp_path / "log", tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        f"for line in range(100):\n    time.sleep(0.05)\n    open({str(log)!r}, 'a').write('line\\n')\n"
        "time.sleep(600)\n"
    )
    first, last = measuring.follow(log, (5, 15), script)
    assert 0 < first < last
    assert len(log.read_text().splitlines()) < 50
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


def test_a_script_that_fails_is_shown(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('no model')")
    with pytest.raises(SystemExit, match="no model"):
        measuring.follow(tmp_path / "log", (5,), script)


def test_what_differs_between_two_releases_is_found():
    facts = {"missing": [], "weights": {"unet": "a", "text_encoder": "b"}, "flagged": 0}
    pictures = np.full((2, 4, 4, 3), 100)
    found = older_libraries.difference([facts, facts], [pictures, pictures])
    assert found["largest_difference"] == 0 and older_libraries.is_alike(found, 0)
    found = older_libraries.difference([facts, facts], [pictures, pictures - 3])
    assert found["largest_difference"] == 3
    assert older_libraries.is_alike(found, 3) and not older_libraries.is_alike(found, 2)
    changes = [{"missing": ["text_encoder.a"]}, {"weights": {"unet": "a", "text_encoder": "c"}}, {"flagged": 1}]
    changes += [{"weights": {"unet": "a"}}]
    for change in changes:
        found = older_libraries.difference([facts, facts | change], [pictures, pictures])
        assert not older_libraries.is_alike(found, 255), change


@pytest.mark.filterwarnings("ignore:.*torch_dtype.*:FutureWarning")
def test_a_missing_weight_is_told_with_the_pictures(tmp_path):
    from safetensors.torch import load_file, save_file

    plain_diffusers.save_tiny_model(tmp_path / "tiny")
    settings = {"seed": 0, "num_images": 2, "num_inference_steps": 2, "output": tmp_path / "pictures.npy"}
    facts = plain_diffusers.draw(tmp_path / "tiny", "a cat", **settings)
    pictures = np.load(tmp_path / "pictures.npy")
    assert pictures.shape == (2, 16, 16, 3) and pictures.std() > 1 and not facts["flagged"]
    assert facts["weights"].keys() == {"vae", "text_encoder", "unet", "safety_checker"} and not facts["missing"]
    path = tmp_path / "tiny" / "text_encoder" / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if name.endswith("final_layer_norm.weight"))
    weights.pop(name)
    save_file(weights, path, {"format": "pt"})
    changed = plain_diffusers.draw(tmp_path / "tiny", "a cat", **settings)
    assert len(changed["missing"]) == 1 and "final_layer_norm.weight" in changed["missing"][0]
