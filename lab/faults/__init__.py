"""Tests real runs of a tiny model against faults: kills, damage, signals, full disks, bad input.

python -m lab.faults --json faults.json --table faults.md [--only kills,damage] [--short]

Parts, in the order of the table in docs/reliability.md:

- repeats: the same command in two directories, and a finished run repeated.
- malformed, odd, permissions, archives, forged: bad input, given to the real commands. A refusal is exit code 2 and one
  line that names the culprit, and changes no file. `odd` has special ids that contradict each other, unusual tables and
  encodings, archives, templates, weights with prefixes; some of it may be accepted, if a line says what was changed.
  `permissions` gives each path argument a directory without access, a name of 300 letters and a path of 6,000; run by
  root, it drops its capabilities. `archives` has a publisher's zip as `prepare` reads it, one of them 6 GiB in 26 MB.
  `forged` has manifests with a correct seal and wrong content: wrong types, absent keys, configs that do not fit the
  arrays.
- streams: commands whose standard streams are closed, full (/dev/full) or lose their reader. The work is done and the
  checkpoint exists; a result that cannot be written is an error of one line.
- environment: trainings under settings of JAX that would change them, compared to the bit with a run without them; and
  flags, platforms and programs that are refused in one line.
- kills: kill -9, half of the time during a save, otherwise at any moment. "During a save" counts the kills that left an
  uncommitted directory. Steps lost are counted from the last step in the log to the newest committed checkpoint.
- pairs: one of two processes is killed. gloo usually notices the broken connection at once, else the heartbeat (10 s
  here) ends the other process.
- moments, moments2: kill -9 at chosen file events. A small library, compiled when the part begins and preloaded, counts
  openings for writing, writes, renames, removals, new directories and fsyncs, and kills the process at one of them, in
  the middle of it for a write. The events are spread over a start, the first save, the start of a resumed run, a save
  that replaces an older step (keep_checkpoints=1), the saves of best/ and the end. The same command must then reach the
  same state and log, and leave no file that an undisturbed run does not leave. `moments2` kills one of two processes.
  Needs Linux, glibc and a C compiler.
- order: the same library records all events of a training, of conversions in both directions and of a decode. The
  events are replayed for a disk that keeps only what was synced. A file must be on that disk, with its content, before
  it gets its final name; an older step may be removed only after a newer one is there. What Rust's libraries write
  counts as lost until it is synced.
- power: the run is on an ext4 disk in an image file. A copy of that file, taken while it is mounted, has the content
  of a disk after a power cut. The copy is mounted, which replays the journal, and the run continues from it. Copies are
  taken during saves and up to 30 s after them. The newest saved step must be found, the run must end as the undisturbed
  one, and results that `convert` and `decode` reported must be complete. Needs root.
- signals: SIGTERM and SIGINT while the first step compiles, between steps, in an evaluation and during a save. The
  current step is finished and its checkpoint is where the run continues. An interrupted evaluation is repeated first.
- full, readonly: a tmpfs of 15 to 85 % of the space that a run needs, and a read-only disk. Each failed save
  is one line; the exit code is 1 only because the last save fails too. With space again, the same command reaches the
  same end. Needs root.
- hangs: directories that become immutable, a disk that answers with errors, eight and forty open files. The process
  must end within a minute, without a traceback, with exit code 1 (2 before the first step) and a last line "error:".
- readers: `checkpoint verify`, `decode` and `convert to-hf` while a training with keep_checkpoints=1 saves at every
  step. Each call must find an intact step.
- meshes (data, fsdp, tensor): 1x1x1, 8x1x1, 1x8x1, 2x2x2, 1x1x4 and 4x1x2 on eight fake CPU devices.
- damage: flipped bits (anywhere, and in the arrays), zeroed ranges, files truncated, deleted, lengthened and swapped,
  items and steps swapped, empty and foreign directories and files in the place of a step; every tenth time all steps.
  The restored state is compared with the saved bytes by code that does not use fingerprints. Not all damage matters:
  nothing reads some of the bytes that Orbax keeps. "Plain Orbax" is `CheckpointManager.restore` of its latest step with
  shapes and shardings, as its documentation shows.
- bits: one bit of one file in tokenizer/ is flipped, and the run is opened for decoding and for training. It must be
  refused in one line, or no id of any text may change.
- poison: a NaN or an infinity in the weights of a batch, between good steps.
"""
