"""Training: a run, from its data to what it leaves.

`loop.train` is the way in. A `recipe` says what is trained, made of a `step` (`microbatches`,
`loss_scaling`, `nonfinite`, `step_metrics`) on a `state`; `programs` are what devices run of it.
`feeding` brings batches (`batch_ramp`, `rows`), which `data` makes of files. A `run` takes the
steps and reports (`metrics`, `meters`, `profiling`, `output`) until something ends it (`stopping`,
`agreement`). What it keeps (`saving`) are `checkpoints`, in a folder that all processes share
(`shared_checkpoints`) and on disks of their own (`local_checkpoints`), with checksums (`seals`);
`beginning` is where it starts from. `weights` go in and out as files, and `exporting` takes them
from a checkpoint. `processes` are those of a job on many hosts.
"""
