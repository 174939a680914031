"""`driftlens.findings.compare` by the name that plug-ins and notebooks know."""

import sys

from driftlens.findings import compare

sys.modules[__name__] = compare
