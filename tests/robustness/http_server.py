"""The HTTP server: eight clients at once, hostile requests among the good ones."""

from tests.hostile_requests import hostile
from tests.http_load import Bank, Running, load
from tests.monte_carlo_tools import data
from tests.robustness.exported import small_export
from tests.robustness.harness import Wrong

__all__ = ["Campaign"]

REQUESTS = 512  # by eight clients
LIMITS = ("--threads", "2", "--max-body-mb", "1", "--timeout", "10")


class Campaign:
    """Every good request has its right answer, every hostile one an error in words."""

    def __init__(self, place):
        folder = small_export(place.folder / "1", overwrite=True)
        self.bank = Bank(folder, data(64, 4))
        self.attacks = hostile(self.bank)
        self.running = Running(folder, *LIMITS)

    def case(self, rng, number):
        """Send some hundred requests."""
        requests = REQUESTS if number else REQUESTS // 2
        report = load(self.running, self.bank, requests, self.attacks, rng.getrandbits(32))
        if self.running.process.poll() is not None:
            raise RuntimeError(f"The server has ended: {self.running.errors()[-300:]}")
        if "Traceback" in self.running.errors():
            raise RuntimeError("The server's log has a traceback.")
        if report.faults:
            raise Wrong(f"{len(report.faults)} faults: {report.faults[0]}")
        return {
            "refused": report.hostile,
            "right": report.right,
            "good requests": requests // 8 * 8,
        }
