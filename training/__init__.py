"""What train.py and pretrain.py share: the driver, the workers and what they write. Nothing here knows rows or columns.

driver       start the workers, follow them, finish      parallel     DDP, FSDP, averaged weights
resuming     is a run done, can it go on                 checkpoints  saved, sealed, restored
workers      a worker's place among the others           validation   pictures while it trains
loop         the steps                                   publishing   the result and its model card
optimizer    AdamW, schedule, clipping, loss scale       logs         log.jsonl and TensorBoard
"""
