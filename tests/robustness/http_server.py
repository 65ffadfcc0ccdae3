"""The HTTP server: eight clients at once, hostile requests among the good ones."""

from tests.monte_carlo_tools import data
from tests.robustness.exported import served, small_export
from tests.robustness.harness import Wrong

__all__ = ["Campaign"]

REQUESTS = 500
LIMITS = ("--threads", "2", "--max-body-mb", "1", "--timeout", "10")


class Campaign:
    """Every good request has its right answer, every hostile one an error in words."""

    def __init__(self, place):
        import tensorflow as tf

        served()
        self.tools = __import__("serve_load")
        folder = small_export(place.folder / "1", overwrite=True)
        signatures = tf.saved_model.load(str(folder)).signatures
        x = data(64, 4)

        def ask(name, **more):
            outputs = signatures[name](features=tf.constant(x), **more)
            return {key: value.numpy() for key, value in outputs.items()}

        answers = {("serve", None): ask("serve"), ("deterministic", None): ask("deterministic")}
        for seed in (0, 5, 10**9):
            answers["sample", seed] = ask("sample", seed=tf.constant(seed))
        self.bank = self.tools.Bank({"features": x}, answers)
        self.attacks = self.tools.hostile(self.bank)
        self.running = self.tools.Running(folder, *LIMITS)

    def case(self, rng, number):
        """Send some hundred requests."""
        requests = REQUESTS if number else REQUESTS // 2
        report = self.tools.load(
            self.running, self.bank, requests, 8, self.attacks, 0.1, rng.getrandbits(32)
        )
        faults = [*report.wrong, *report.lost]
        if self.running.process.poll() is not None:
            raise RuntimeError(f"The server has ended: {self.running.errors()[-300:]}")
        if "Traceback" in self.running.errors():
            raise RuntimeError("The server's log has a traceback.")
        if faults:
            raise Wrong(f"{len(report.wrong)} wrong, {len(report.lost)} lost: {faults[0]}")
        hostile = sum(report.hostile.values())
        return {"refused": hostile, "right": report.right, "good requests": report.sent}
