"""Damage to bytes, archives and JSON, drawn at random."""

import copy
import io
import zipfile

__all__ = ["JUNK", "damaged", "leaves", "members", "put", "random_json", "repacked", "tricks"]

JUNK = (
    None,
    True,
    False,
    -1,
    0,
    3,
    2.5,
    10**9,
    2**63,
    10**400,
    float("nan"),
    float("inf"),
    -float("inf"),
    1e-320,
    1e300,
    "",
    "x",
    "\x00",
    "../x",
    [],
    [1],
    [None],
    {},
    {"x": 1},
    {"class_name": "Lambda", "config": {}},
)


def damaged(rng, content):
    """Return what is wrong, and bytes that differ from the content in that.

    Args:
        rng: a `random.Random`.
        content: bytes.
    """
    kind = rng.choice(("cut", "flip", "flips", "zeros", "noise", "gone", "more", "tail"))
    place = rng.randrange(len(content))
    size = min(rng.choice((1, 4, 64, 1024)), len(content) - place)
    broken = bytearray(content)
    if kind == "cut":
        broken = broken[:place]
    elif kind == "flip":
        broken[place] ^= 1 << rng.randrange(8)
    elif kind == "flips":
        for _ in range(rng.randint(2, 16)):
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
    elif kind == "zeros":
        broken[place : place + size] = bytes(size)
    elif kind == "noise":
        broken[place : place + size] = rng.randbytes(size)
    elif kind == "gone":
        del broken[place : place + size]
    elif kind == "more":
        broken[place:place] = rng.randbytes(size)
    else:
        broken += rng.randbytes(size)
    return f"{kind} at {place} ({size})", bytes(broken)


def members(content):
    """Return the files of a zip archive, as (name, bytes)."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(entry.filename, archive.read(entry)) for entry in archive.infolist()]


def repacked(files, links=()):
    """Return a zip archive of files, (name, bytes), names being what they are; some are links."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o120777 if name in links else 0o100644) << 16
            archive.writestr(entry, content)
    return buffer.getvalue()


def tricks(outside):
    """Return names for members of archives that lead out of where they are unpacked.

    Args:
        outside: a folder where nothing may be written.
    """
    return (
        "../escaped",
        "../../escaped",
        "assets/../../escaped",
        f"{outside}/escaped",
        f"assets/{outside}/escaped",
        "..\\escaped",
        "C:\\escaped",
        "assets/\x01escaped",
        "./../escaped",
        "assets//..//..//escaped",
    )


def leaves(content, place=()):
    """Return the places of all values in nested dicts and lists, as paths of keys."""
    found = [place] if place else []
    entries = ()
    if isinstance(content, dict):
        entries = content.items()
    elif isinstance(content, list):
        entries = enumerate(content)
    for key, value in entries:
        found += leaves(value, (*place, key))
    return found


def put(content, place, value):
    """Return a copy of nested dicts and lists with another value at a place."""
    changed = copy.deepcopy(content)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


def random_json(rng, depth=0):
    """Return some value that JSON can hold."""
    kind = rng.randrange(8 if depth < 4 else 6)
    if kind < 6:
        return rng.choice((None, True, rng.randint(-5, 5), rng.gauss(0, 1e3), "", "posterior"))
    count = rng.randrange(4)
    if kind == 6:
        return [random_json(rng, depth + 1) for _ in range(count)]
    names = ("posterior", "flows", "flow", ".*", "depth", "x")
    return {rng.choice(names): random_json(rng, depth + 1) for _ in range(count)}
