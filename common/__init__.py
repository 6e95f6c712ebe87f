"""What every script uses: the command line, Ray, folders and stores, pictures. Nothing here knows of diffusion.

errors     exceptions and exit codes           folders  whole or absent: manifests, locks, digests
messages   progress on stderr, the result      storage  folders by path or URI: disks, S3, Google Cloud
cli        the main loop of a script, flags    images   pictures found, decoded, checked, cropped
cluster    Ray: started, joined, shared        no_gc    Python's garbage collector, off for a while
actors     work on a pool of Ray Data actors
"""
