"""Code that every script shares and that knows nothing of diffusion models. It imports no other package of the project.

errors     exceptions with their exit codes
messages   messages and progress on stderr, the result on stdout
cli        entry point of a script, flag types, shared flags
cluster    start or join Ray, share its CPUs and GPUs
actors     map work over a pool of Ray Data actors
folders    atomic writes, manifests, publishing, file locks, digests
storage    local folders and object stores (S3, Google Cloud Storage) behind one class
images     find, decode, check, crop and scale images
no_gc      suspend Python's garbage collector
"""
