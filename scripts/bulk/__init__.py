"""Scores tables of any size with an exported file, on an Apache Beam runner."""

import logging

logging.getLogger().setLevel(logging.ERROR)  # Beam says much, when it is imported already
