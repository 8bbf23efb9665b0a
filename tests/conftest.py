"""For all tests, before any of them imports torch."""

import os

from flowprefill.openmp import let_threads_sleep

let_threads_sleep(os.environ)
