"""Pre-training data: raw images and captions, the latents made from them, and the batches of each training worker.

raw_data   lists Parquet files, metadata.jsonl and tars as sources
sources    where rows are: sources and chunks, as arrays
rows       reads the rows of a source
tally      counts of rows, shares of bad ones
tars       samples of WebDataset tars: counts, indexes and reads them
filters    conditions on the columns of Parquet files
fetching   fetches image URLs, hundreds at a time
loader     reads, decodes and crops the images of rows
captions   encodes captions
latents    encodes images and captions; opens and reads data sets of latents
columns    Parquet columns of tensors
index      which parts a data set has, in arrays
statistics histograms of sizes and lengths, why rows are bad
pictures   the contact sheet of a data set
card       README.md and statistics.json of a data set
parts      writes one Parquet file of latents per chunk of rows: the actor of preprocess.py
streams    order of the rows on each worker
online     raw data encoded while training
batches    training and validation batches, with noise and timesteps
feeding    the batches of a worker, from the data to the step
inputs     the flags of data and model, and what they name
resources  CPUs and GPUs of the actors that load data
"""
