import errno
import json
import threading
from pathlib import Path

import pytest

from lib import files as run_files
from tfp_ibnn._core import files

pytestmark = pytest.mark.once


def write(path, text):
    with files.replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "kept.json"
    path.write_text('"old"', encoding="utf-8")
    return path


def test_the_new_file_appears_only_at_the_end(target):
    with files.replacing(target) as temporary:
        temporary.write_text("new")
        assert temporary.parent == target.parent  # another file system would need a copy
        assert temporary.suffix == target.suffix
        assert target.read_text() == '"old"'
    assert target.read_text() == "new"
    assert names(target.parent) == ["kept.json"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError])
def test_an_error_in_the_middle_keeps_the_old_file(target, error):
    def write():
        with files.replacing(target) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert target.read_text() == '"old"'
    assert names(target.parent) == ["kept.json"]


def test_a_writer_that_writes_nothing_keeps_the_old_file(target):
    with pytest.raises(FileNotFoundError), files.replacing(target):
        pass
    assert target.read_text() == '"old"'
    assert names(target.parent) == ["kept.json"]


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_full_disk_keeps_the_old_file(target, monkeypatch, call):
    if call == "open":
        monkeypatch.setattr(Path, "write_text", no_space)
    elif call == "fsync":
        monkeypatch.setattr(files.os, "fsync", no_space)
    else:
        monkeypatch.setattr(Path, "replace", no_space)
    with pytest.raises(OSError, match="No space left") as caught:
        write(target, json.dumps({"a": 1}))
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert target.read_text() == '"old"'
    assert names(target.parent) == ["kept.json"]


def test_the_contents_are_on_disk_before_the_name(target, monkeypatch):
    calls = []
    fsync, replace = files.os.fsync, Path.replace
    monkeypatch.setattr(files.os, "fsync", lambda fd: calls.append("fsync") or fsync(fd))
    monkeypatch.setattr(
        Path, "replace", lambda self, to: calls.append("replace") or replace(self, to)
    )
    write(target, "new")
    assert calls == ["fsync", "replace"]


@pytest.mark.parametrize("name", ["no_suffix", "two.dots.npz", ".hidden", "with space.csv", "ä.md"])
def test_any_name_will_do(tmp_path, name):
    write(tmp_path / name, "text")
    assert names(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "text"


def test_a_path_may_be_a_string(tmp_path):
    write(str(tmp_path / "a.txt"), "ä\n")
    assert (tmp_path / "a.txt").read_bytes() == "ä\n".encode()


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "missing" / "a.txt", "text")
    assert names(tmp_path) == []


def test_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write(tmp_path / "a.json", "1")
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_json_lacks_is_refused(target, number):
    with pytest.raises(ValueError, match="JSON"):
        run_files.write_json(target, {"deep": [1.0, {"er": number}]})
    assert target.read_text() == '"old"'
    assert names(target.parent) == ["kept.json"]


def test_what_is_no_json_is_refused(target):
    with pytest.raises(TypeError):
        run_files.write_json(target, {"a": object()})
    assert target.read_text() == '"old"'


def test_json_comes_back(target):
    content = {"a": [1, 2.5, None, True, "ä\n"], "b": {}}
    run_files.write_json(target, content)
    text = target.read_text(encoding="utf-8")
    assert json.loads(text) == content
    assert text.endswith("\n")


def test_writers_at_once_leave_one_whole_file(target):
    contents = [[number] * 20_000 for number in range(4)]
    problems, stop = [], threading.Event()

    def write_often(content):
        for _ in range(15):
            write(target, json.dumps(content))

    def read():
        while not stop.is_set():
            try:
                found = json.loads(target.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                problems.append(error)
                return
            if found != "old" and found not in contents:
                problems.append(found)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write_often, args=(content,)) for content in contents]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert not problems
    assert json.loads(target.read_text()) in contents
    assert names(target.parent) == ["kept.json"]


def test_leftovers_of_killed_writers_go_and_nothing_else(tmp_path):
    left = tmp_path / f".training-{'0a' * 16}.npz"
    folder = tmp_path / f".saved_model-{'1b' * 16}"
    kept = [tmp_path / "training.npz", tmp_path / ".hidden", tmp_path / "a-0123.npz"]
    folder.mkdir()
    for path in (left, folder / "part", *kept):
        path.touch()
    run_files.remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_lock_is_held_until_it_is_closed(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("{}")
    lock = run_files.locked(path)
    assert run_files.locked(path) is None
    lock.close()
    run_files.locked(path).close()


def test_file_systems_without_locks_do_without(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    path = tmp_path / "record.json"
    path.write_text("{}")
    monkeypatch.setattr(run_files.fcntl, "flock", refuse)
    run_files.locked(path).close()


def test_what_was_replaced_before_it_was_locked_is_locked_anew(tmp_path, monkeypatch):
    path, real = tmp_path / "record.json", run_files.fcntl.flock
    path.write_text("old")
    calls = []

    def replaced(file, how):
        calls.append(how)
        if len(calls) == 1:
            run_files.write_text(path, "new")
        real(file, how)

    monkeypatch.setattr(run_files.fcntl, "flock", replaced)
    with run_files.locked(path) as file:
        assert file.read() == b"new"
        assert run_files.locked(path) is None


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    target = tmp_path / "target"
    for content in ("one", "two"):
        with files.replacing_folder(target) as temporary:
            temporary.mkdir()
            (temporary / "file").write_text(content)
        assert (target / "file").read_text() == content
    with pytest.raises(RuntimeError), files.replacing_folder(target) as temporary:  # noqa: PT012
        temporary.mkdir()
        raise RuntimeError
    assert (target / "file").read_text() == "two"
    assert list(tmp_path.iterdir()) == [target]
