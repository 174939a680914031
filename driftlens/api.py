"""`driftlens.front.api` by the name that plug-ins and notebooks know."""

import sys

from driftlens.front import api

sys.modules[__name__] = api
