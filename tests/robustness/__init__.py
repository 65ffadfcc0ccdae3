"""Campaigns of hostile and broken input, run by `make robustness` and, in small, by the tests.

`harness` runs them, each case in a child process; the other modules hold one campaign each.
"""
