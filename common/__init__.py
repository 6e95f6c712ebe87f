"""Code that every script shares and that knows nothing of diffusion models. It imports no other package of the project.

errors     exceptions with their exit codes
messages   messages and progress on stderr, the result on stdout
cli        entry point of a script, flag types, shared flags
cluster    start or join Ray, share its CPUs and GPUs
actors     map work over a pool of Ray Data actors
folders    atomic writes, manifests, publishing, file locks, digests
uris       options of a URI, errors of object stores
stores     requests to object stores (S3, Google Cloud Storage): conditional writes, large files
objects    folders in object stores: publish whole or not at all, local copies in a cache
cache      folders on the node's disk that were downloaded: filled once, bounded
leases     locks in object stores, and writes that only their holder can make
storage    local folders and object stores (S3, Google Cloud Storage) behind one class
images     find, decode, check, crop and scale images
no_gc      suspend Python's garbage collector
"""
