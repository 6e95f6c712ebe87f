"""The data of pre-training: raw images and captions, latents, and the order in which workers see them.

raw_data   images and captions as they lie around, row by row    latents    encoding, Parquet columns, metadata.json
loader     images fetched, decoded and cropped                   streams    which rows a worker sees, and when
resources  CPUs and GPUs for who reads and encodes
"""
