"""Pipelining: a training step whose layers are split over axes of the mesh becomes a pipeline.

    pipeline = pipelined(graph, layout, mesh, options)  # its graph and layout, or None

This is a rewriting of the graph, before placement: the loop over microbatches becomes loops over
the ticks of a schedule. All other stages of lowering then treat it as any other program.

| module | has |
|---|---|
| `finding.py` | the loops that a rule such as `layers:pipe` makes a pipeline |
| `parts.py` | which operations of a microbatch belong to which part of a tick |
| `timetable.py`, `clocking.py` | in which ticks the chunks of a stack do their passes |
| `joint.py` | several stacks, one after the other; what each stage does in each tick, as numbers |
| `regions.py` | tensors of which every stage has its own value |
| `chunks.py` | the layers of a stage, and its buffers |
| `layers.py` | the passes over the chunks of one stack |
| `loops.py`, `ticks.py` | the loops over ticks, and what a tick does |
| `rewriting.py` | `pipelined` |
"""
