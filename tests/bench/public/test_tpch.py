"""TPC-H by data frames: answers equal DuckDB's, wrong ones are found, and tables are whole or refused."""

from __future__ import annotations

import math
import shutil
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import checked_client
from distributed import Client

from ferroflow_dask import install
from ferroflow_dask.bench.public import tpch
from ferroflow_dask.bench.public.base import Clock, Options, Program, missing
from ferroflow_dask.bench.public.tpch import SUITE, TABLES, check_scale, differs, extension, tables
from ferroflow_dask.exceptions import UsageError

pd = pytest.importorskip("pandas")
pq = pytest.importorskip("pyarrow.parquet")
duckdb = pytest.importorskip("duckdb")
pytest.importorskip("duckdb_extension_tpch")

# Dask reads Parquet by an argument that pandas 3.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword:DeprecationWarning")
SCALE = tpch.LEAST_SCALE


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        tpch._generator()
    except UsageError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("it's data")
    unfinished = folder / f".tpch-{SCALE}.unfinished" / "lineitem"
    unfinished.mkdir(parents=True)
    (unfinished / "lineitem.1.parquet").write_bytes(b"PAR1 and a half of the r")
    return folder


@pytest.fixture(scope="module")
def programs(data: Path) -> dict[str, Program]:
    return {program.name: program for program in SUITE.programs(Options(scale=SCALE, data=data, workers=2))}


@pytest.fixture(scope="module")
def answers(programs: dict[str, Program]) -> dict[str, Any]:
    return {name: program.expected() for name, program in programs.items() if program.expected}


@pytest.fixture(scope="module", params=["stock", "plugin"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    with checked_client(2, processes=False, set_as_default=False) as client:
        if request.param == "plugin":
            install(client)
        yield client


NAMES = [f"q{n:02}" for n in range(1, 23)]
#: Queries without a row at the smallest scale.
EMPTY = {"q17"}


def test_there_is_a_program_for_each_query(programs: dict[str, Program]) -> None:
    assert list(programs) == NAMES
    assert not missing(SUITE)
    assert all(program.sizes == {"scale": SCALE} for program in programs.values())


@pytest.mark.parametrize("name", NAMES)
def test_pandas_gives_the_answer_of_duckdb(
    name: str, programs: dict[str, Program], answers: dict[str, Any]
) -> None:
    expected = answers[name]
    if name not in EMPTY:
        assert len(expected) if hasattr(expected, "columns") else expected
    assert programs[name].differs(programs[name].anchors["pandas"](Clock()), expected) == ""


@pytest.mark.cluster
# One each with a limit, an outer join, a number, a maximum of sums, and three joins with the same table.
@pytest.mark.parametrize("name", ["q02", "q13", "q14", "q15", "q21"])
def test_a_cluster_gives_the_answer_of_duckdb(
    name: str, client: Client, programs: dict[str, Program], answers: dict[str, Any]
) -> None:
    assert programs[name].differs(programs[name].run(client, Clock()), answers[name]) == ""


def test_threads_give_the_answer_of_duckdb(programs: dict[str, Program], answers: dict[str, Any]) -> None:
    assert programs["q03"].differs(programs["q03"].anchors["threads"](Clock()), answers["q03"]) == ""


# Comparison

ROWS = {"name": ["a", "b", "c"], "n": [2, 1, 1], "total": [3e11, 2.5, 1.5]}


def test_rows_that_are_equal_in_the_order_may_be_swapped() -> None:
    expected = pd.DataFrame(ROWS)
    swapped = expected.iloc[[0, 2, 1]].reset_index(drop=True)
    assert differs(swapped, expected, ["n"]) == ""
    assert differs(swapped, expected) == ""
    assert differs(swapped, expected, ["total"])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"total": [3e11, 2.5, 1.5 + 1e-6]}, id="a float beyond the tolerance"),
        pytest.param({"total": [3e11 + 200, 2.5, 1.5]}, id="a sum that differs by $200"),
        pytest.param({"total": [3e11, 2.5, math.nan]}, id="a float that is missing"),
        pytest.param({"n": [2, 1, 2]}, id="a count that differs by one"),
        pytest.param({"name": ["a", "b", "d"]}, id="another key"),
        pytest.param({"more": [1, 2, 3]}, id="a column too many"),
    ],
)
def test_a_wrong_row_is_found(change: dict[str, Any]) -> None:
    assert differs(pd.DataFrame({**ROWS, **change}), pd.DataFrame(ROWS), ["n"])


def test_other_wrong_answers_are_found() -> None:
    expected = pd.DataFrame(ROWS)
    assert differs(expected.iloc[:2], expected) == "2 rows, expected 3"
    assert differs(3.0, expected)
    assert differs(None, expected)
    assert differs(expected, 3.0)
    assert differs(3.00001, 3.0)
    assert differs(math.nan, 3.0)
    assert differs(3e11 + 200, 3e11) == "value 0 is 300000000200.0, expected 300000000000.0"
    assert differs(3e11 + 1, 3e11) == ""


@pytest.mark.parametrize("name", ["q01", "q06"])
def test_the_answer_to_another_program_is_wrong(
    name: str, programs: dict[str, Program], answers: dict[str, Any]
) -> None:
    others = [
        one for one in NAMES if one != name and programs[name].differs(answers[one], answers[name]) == ""
    ]
    assert not others


# Tables


def test_tables_have_several_files_of_floats_and_timestamps(data: Path, programs: dict[str, Program]) -> None:
    folder = tables(data, SCALE)
    assert {path.name for path in folder.iterdir()} == set(TABLES)
    assert len(list((folder / "lineitem").iterdir())) == tpch.FILES
    schema = pq.read_schema(next((folder / "lineitem").iterdir()))
    assert str(schema.field("l_shipdate").type) == "timestamp[us]"
    assert str(schema.field("l_comment").type) == "string"
    prices = pd.read_parquet(folder / "lineitem", columns=["l_extendedprice"]).l_extendedprice
    assert (prices == (prices * 100).round() / 100).all(), "the nearest doubles"


def stub(folder: Path, script: str) -> str:
    path = folder / tpch.GENERATOR
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def empty_tables(folder: Path, names: Sequence[str]) -> Path:
    for table in names:
        (folder / table).mkdir(parents=True)
        (folder / table / "1.parquet").touch()
    return folder


def test_a_generator_that_fails_leaves_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    stub(tmp_path, "echo progress >&2; echo 'the disk is full' >&2; exit 3")
    with pytest.raises(UsageError, match="must write the tables of tpch, got: the disk is full"):
        tables(tmp_path, SCALE)
    assert not (tmp_path / f"tpch-{SCALE}").exists()


def test_tables_of_an_interrupted_process_are_written_anew(data: Path, programs: dict[str, Program]) -> None:
    left = set(data.iterdir()) - {tables(data, SCALE)}
    assert {path.name for path in left} == {f".tpch-{SCALE}.lock"}
    assert len(pd.read_parquet(data / f"tpch-{SCALE}" / "lineitem", columns=["l_orderkey"])) == 60_175


def test_a_second_process_waits_for_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def write(generator: str, folder: Path, scale: float) -> None:
        written.append(folder)
        empty_tables(tmp_path / "new", TABLES).rename(folder)

    monkeypatch.setattr(tpch, "_write", write)
    monkeypatch.setattr(tpch, "_generator", lambda: "")
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: tables(tmp_path, SCALE), range(4)))
    assert len(folders) == len(written) == 1


# Bad input


def test_a_folder_without_a_table_is_refused(tmp_path: Path) -> None:
    empty_tables(tmp_path / f"tpch-{SCALE}", TABLES[1:])
    with pytest.raises(UsageError, match="must have all tables of TPC-H, got none of lineitem; delete"):
        tables(tmp_path, SCALE)


@pytest.mark.parametrize("scale", [0, -1, 0.001, math.nan, math.inf])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(UsageError, match=r"--scale must be at least 0\.01, got .*; for example"):
        check_scale(scale)


def test_a_scale_above_memory_is_refused_with_both_amounts(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"memory of [\d.,]+ GiB, got sizes that need [\d.,]+ GiB; pass"
    ) as error:
        SUITE.programs(Options(scale=1e6, data=tmp_path))
    assert "\n" not in str(error.value)
    assert not any(tmp_path.iterdir())


def test_a_scale_above_the_disk_is_refused_with_both_amounts(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    with pytest.raises(UsageError, match=r"0\.0 GiB free, got a scale that needs 0\.4 GiB"):
        tables(tmp_path / "new", 1.0)
    assert not (tmp_path / "new").exists()


def test_a_missing_generator_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(UsageError, match=r"pip install tpchgen-cli==4\.0\.0"):
        tables(tmp_path, SCALE)


def test_another_duckdb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duckdb, "__version__", "1.0.0")
    with pytest.raises(UsageError, match=r"duckdb must be .*, got 1\.0\.0; pip install duckdb=="):
        extension()
