# SPDX-License-Identifier: Apache-2.0
"""What attention costs on this machine, beside torch's own without a bias: ``linbias bench``.

The way of a run: `run.bench` checks that what it will time is right, plans measurements, and `record.measure` makes
those that an interrupted run left over. Each is a `race`: implementations timed in turns (`timing`) on one input.
`show` makes a table and a picture of the record. The project's own tracking, in benchmarks/, builds on the same parts.
"""
