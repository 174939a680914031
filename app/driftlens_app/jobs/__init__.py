"""Jobs: the command line, started as a process of its own and watched from outside.

What a job does stands on disk: a record for the newest job of each kind (which process, from when, with which
settings) beside its log, and the run's own status.json, run.lock and events.jsonl. So a page that is closed, drawn
twice or served by a restarted server finds the same job, and never starts a second one.

    job = start(calibrate_request(run, settings))   # the new job, or the one that runs already
    view = watch(run.path)                          # of the newest job: state, progress, failure
    cancel(view.job)                                # asks; after a grace period, `watch` insists
"""

from driftlens_app.jobs.processes import View, cancel, start, watch
from driftlens_app.jobs.record import Job, Request, job_of

__all__ = ["Job", "Request", "View", "cancel", "job_of", "start", "watch"]
