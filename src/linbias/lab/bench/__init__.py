# SPDX-License-Identifier: Apache-2.0
"""What attention costs: the library beside its peers, in one run.

The way of a run: `run.bench` checks that what it will time is right, plans jobs, and runs those that an interrupted run
left over. A job (`races`, `figures`, `memory`) makes its inputs, times implementations in turns (`timing`) and returns
`record.Timing`s and `record.Figure`s; `record.Record` keeps them in results.json after every job. `tables` and `plot`
show a record.
"""

from .run import Unfit as Unfit
from .run import bench as bench
from .run import write_report as write_report
from .tables import describe as describe
