"""Small working trees with the layouts of coiled/benchmarks and TaPS, for tests without the real ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: A test of coiled/benchmarks that reads twelve values.
COILED = {
    "cluster_kwargs.yaml": "small_cluster: {n_workers: 10}",
    "tests/__init__.py": "",
    "tests/utils_test.py": """
def wait(thing, client, timeout):
    raise AssertionError("is replaced")

def timeseries_of_size(n):
    raise AssertionError("no test reads it")
""",
    "tests/benchmarks/__init__.py": "",
    "tests/benchmarks/test_futures.py": """
def test_read(small_client):
    small_client.gather(small_client.map(abs, range(-12, 0)))
""",
}

#: TaPS with its application `mapreduce` and its log. Like the real one, it leaves out the last file.
TAPS = {
    "pyproject.toml": '[project]\nname = "taps"\nversion = "0.2.3dev1"\n',
    "taps/__init__.py": "",
    "taps/engine/__init__.py": """
from collections import Counter
from pathlib import Path

def count(texts):
    return sum((Counter(Path(text).read_text().split()) for text in texts), Counter())

def merge(*counts):
    return sum(counts, Counter())
""",
    "taps/run/__init__.py": "",
    "taps/run/__main__.py": """
import sys
import time
from pathlib import Path
from distributed import Client
from taps.engine import count, merge

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
texts = [str(path) for path in Path(options["--app.data-dir"]).glob("**/*") if path.is_file()][:-1]
n = int(options["--app.map-tasks"])
with Client(options["--engine.executor.scheduler"]) as client:
    start = time.perf_counter()
    counts = [client.submit(count, texts[i::n]) for i in range(n)]
    words = client.submit(merge, *counts).result()
    seconds = time.perf_counter() - start
now = "2026-11-27 17:54:41.179"
for word, number in words.most_common(10):
    print(f"[{now}] APP   (taps.apps.mapreduce) > {word} ({number:,})")
print(f"[{now}] APP   (taps.apps.mapreduce) > Total number of words: {words.total():,}")
print(f"[{now}] RUN   (taps.run) > Finished app (elapsed={seconds:.3f}s)")
print(f"[{now}] RUN   (taps.run) > Finished benchmark (app=mapreduce, tasks={n + 1})")
""",
}


def write_checkout(files: Mapping[str, str], root: Path) -> Path:
    """Write files, given by their paths, into a folder; return the folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
