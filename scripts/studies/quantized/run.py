"""Networks with a Gaussian over z, in files of several precisions, each scored in its own runtime.

Data, networks and training are those of the study of distillation. The scores of all files of a
network are of the same test images and the same draws.
"""

import tempfile
from pathlib import Path

import keras

import tfp_ibnn as ibnn
from lib import provenance
from lib.tasks import apart, run_tasks
from studies.distill import run as distill
from studies.distill.run import Problem, teacher_of

TESTED = {"digits": 1_000, "fashion_lenet": 10_000, "cifar_vgg16": 500}  # images, at most
PAIRS = {name: distill.PAIRS[name] for name in TESTED}
FILES = {  # titles, and how they are exported
    "onnx": ("ONNX, 32 bits", {"format": "onnx"}),
    "litert": ("LiteRT, 32 bits", {"format": "litert"}),
    "float16": ("LiteRT, weights in 16 bits", {"format": "litert", "quantization": "float16"}),
    "dynamic": ("LiteRT, weights in 8 bits", {"format": "litert", "quantization": "dynamic"}),
    "int8": ("LiteRT, all in 8 bits", {"format": "litert", "quantization": "int8"}),
}
ONE = ("one network, LiteRT, 32 bits", {"format": "litert"})
REPRESENTATIVE = 200  # images from which int8 takes its ranges
MODELS = Path("outputs/quantized")  # trained networks, by pair and seed


def trained(pair, seed, quick=False, data_dir=None, models=MODELS):
    """Return a problem and its trained network, which is trained and kept if it is not there."""
    problem = Problem(pair, seed, quick, data_dir)
    path = Path(models) / f"{pair}_{seed}{'_quick' * quick}.keras"
    if not path.exists():
        teacher = teacher_of(problem, "Gaussian over z", None)
        path.parent.mkdir(parents=True, exist_ok=True)
        teacher.inner.save(path)
    return problem, keras.saving.load_model(path)


def run(pair, seed, quick=False, data_dir=None, models=MODELS):
    """Export and score one network; return the record. Quick runs only show that it works."""
    problem, network = trained(pair, seed, quick, data_dir, models)
    average = problem.averaged(network, samples=problem.draws, head="softmax", from_logits=True)
    one = problem.averaged(
        ibnn.to_deterministic(network), samples=1, head="softmax", from_logits=True
    )
    found = {"one": exported(problem, one, ONE[1])}
    for name, (_, options) in FILES.items():
        found[name] = exported(problem, average, options)
    about = {"pair": pair, "seed": seed, **provenance({"quick": quick})}
    return {**about, "draws": problem.draws, "files": found}


def exported(problem, model, options):
    """Return the scores of a model's file in its runtime, and its size."""
    tested = slice(TESTED[problem.pair])
    options = dict(options)
    if options.get("quantization") == "int8":
        options["representative_data"] = problem.train[0][:REPRESENTATIVE]
    suffix = {"onnx": "onnx", "litert": "tflite"}[options["format"]]
    with tempfile.TemporaryDirectory() as folder:
        path = ibnn.export(model, Path(folder) / f"model.{suffix}", **options)
        scores = ibnn.exported_scores(
            path,
            problem.test[0][tested],
            problem.test[1][tested],
            ood=problem.ood[tested],
            batch_size=100,
        )
        return {**scores, "megabytes": round(path.stat().st_size / 1e6, 4)}


def run_all(pairs, seeds, folder, *, quick=False, jobs=1, data_dir=None):
    """Run what `runs.jsonl` in the folder lacks; return how many failed.

    Without TensorFlow, which writes the files, networks are trained only.
    """
    every = [(pair, seed) for pair in pairs for seed in seeds]
    if keras.backend.backend() != "tensorflow":
        for pair, seed in every:
            apart(_train, pair, seed, quick, data_dir)
            print(f"{pair}, seed {seed}: trained; TensorFlow exports it", flush=True)
        return 0

    def shown(record):
        sizes = [f"{name} {row['megabytes']:.2f} MB" for name, row in record["files"].items()]
        return ", ".join(sizes)

    return run_tasks(run, every, (quick, data_dir), folder, jobs, shown)


def _train(*task):
    trained(*task)
