"""Workers: run scheduled functions on copies of variables."""
