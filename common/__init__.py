"""Code that every script shares and that knows nothing of diffusion models. It imports no other package of the project.

errors     exceptions with their exit codes
messages   messages and progress on stderr, the result on stdout
cli        entry point of a script, flag types, shared flags
cluster    start a local Ray, or join a cluster and send it the code
nodes      the nodes of a Ray instance: a worker's share of them, what a run waits for
board      what workers tell their driver, and its request to stop
actors     map work over a pool of Ray Data actors
folders    atomic writes, manifests, publishing, file locks, digests
outages    waiting for stores and servers that do not answer
uris       options of a URI, errors of object stores
stores     requests to object stores (S3, Google Cloud Storage): conditional writes, large files
objects    folders in object stores: publish whole or not at all, local copies in a cache
cache      folders on the node's disk that were downloaded: filled once, bounded
leases     locks in object stores, and writes that only their holder can make
targets    output folders by path or URI: locks, publishing, small files
storage    local folders and object stores (S3, Google Cloud Storage) behind one class
images     find, decode, check, crop and scale images
sheets     contact sheets of images
buckets    sizes of about the same number of pixels that images are cropped to
no_gc      suspend Python's garbage collector
"""
