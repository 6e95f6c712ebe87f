"""The training machinery that train.py and pretrain.py share. Nothing here knows rows or columns of data.

driver       a run from its flags to its result       optimizer    AdamW, learning-rate schedule, clipping, loss scale
launch       workers on Ray, again after a loss       following    shows what the workers tell
resuming     is a run done, can it continue           parallel     DDP, FSDP, exponential moving average
task         what a worker has to know, by topic      checkpoints  saved, sealed, restored
flags        command-line flags of both scripts       logs         log.jsonl and TensorBoard
workers      a worker's place among the others        validation   validation images
loop         the training loop                        publishing   the published pipeline and its model card
modules      the modules to train, loaded             inputs       checks of flags and folders
dreambooth_flags  command-line flags of train.py alone
pretraining_flags  those of pretrain.py alone
subjects     photos and class images of train.py, and the text of each
adapters     the adapters of a LoRA: added, saved, published
quantization the frozen weights under a LoRA in 8 or 4 bits
estimate     memory that a training takes, calculated
work_folder  log and images of a run, on a disk or copied to a store
"""
