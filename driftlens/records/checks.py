"""`driftlens.findings.checks` by the name that plug-ins and notebooks know."""

import sys

from driftlens.findings import checks

sys.modules[__name__] = checks
