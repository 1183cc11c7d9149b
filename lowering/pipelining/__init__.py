"""Pipelining: rewrites a training step as a pipeline, if the layout splits its layers.

    pipeline = pipelined(graph, layout, mesh, options)  # its graph and layout, or None

The rewriting happens before placement. The loop over microbatches becomes loops over the ticks of a
schedule. All later steps of lowering treat the result as any other graph.

| module | has |
|---|---|
| `finding.py` | the loops that a rule such as `layers:pipe` makes a pipeline |
| `parts.py` | the part of a tick to which each operation of a microbatch belongs |
| `timetable.py`, `clocking.py` | the ticks of all passes over one stack |
| `joint.py` | the ticks of several stacks, and the work of each stage in each tick, as numbers |
| `regions.py` | tensors that have one value per stage |
| `chunks.py` | the layers of a stage, and its buffers |
| `layers.py` | the passes over the chunks of one stack |
| `loops.py`, `ticks.py` | the loops over ticks, and the body of a loop |
| `rewriting.py` | `pipelined` |
"""
