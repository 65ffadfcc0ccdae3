"""Scores tables of any size with an exported file, on an Apache Beam runner."""
