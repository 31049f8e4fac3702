"""The 22 queries of TPC-H on data frames, each once, for pandas and for `dask.dataframe`.

Written after the business questions of the TPC-H specification 3.0.1, clause 2.4, with its validation
parameters. The fraction of query 11 is that of scale 1 at any scale, as in DuckDB's texts. A query reads the
columns that it needs; its decorator has the order and the number of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Reads a table's columns: the name of the table, then of columns; returns a frame.
Read = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Query:
    """A query: calling it returns a lazy frame or number of Dask, or what pandas has computed.

    Parameters
    ----------
    compute : callable
        Takes a function that reads tables; returns the rows in any order, or a number.
    order : mapping of str to bool
        Columns that rows are sorted by; True is ascending.
    limit : int
        First rows that count; 0 for all.
    """

    compute: Callable[[Read], Any]
    order: dict[str, bool]
    limit: int = 0

    def __call__(self, read: Read) -> Any:
        """Compute the answer with a function that reads tables."""
        rows = self.compute(read)
        if self.order:
            rows = rows.sort_values(list(self.order), ascending=list(self.order.values()))
        # Without an argument that pandas lacks, `head` of a Dask frame computes it.
        return rows.head(self.limit) if self.limit else rows


def _rows(*columns: str, limit: int = 0) -> Callable[[Callable[[Read], Any]], Query]:
    """Make a function a query whose rows are sorted by columns; `-column` is descending."""
    order = {column.removeprefix("-"): not column.startswith("-") for column in columns}
    return lambda compute: Query(compute, order, limit)


_number = _rows()


def _within(days: Any, start: str, end: str) -> Any:
    return (days >= np.datetime64(start)) & (days < np.datetime64(end))


def _revenue(items: Any) -> Any:
    return items.l_extendedprice * (1 - items.l_discount)


def _with_revenue(items: Any) -> Any:
    return items.assign(revenue=_revenue(items))


def _suppliers(read: Read, nations: Any, *columns: str) -> Any:
    suppliers = read("supplier", "s_suppkey", "s_nationkey", *columns)
    return suppliers.merge(nations, left_on="s_nationkey", right_on="n_nationkey")


def _nations(read: Read, *names: str) -> Any:
    nations = read("nation", "n_nationkey", "n_name")
    return nations[nations.n_name.isin(list(names))] if names else nations


def _nations_of(read: Read, region: str) -> Any:
    nations = read("nation", "n_nationkey", "n_name", "n_regionkey")
    regions = read("region", "r_regionkey", "r_name")
    return nations.merge(regions[regions.r_name == region], left_on="n_regionkey", right_on="r_regionkey")


_PRICES = ("l_extendedprice", "l_discount")


@_rows("l_returnflag", "l_linestatus")
def _q01(read: Read) -> Any:
    flags = ["l_returnflag", "l_linestatus"]
    items = read("lineitem", *flags, "l_quantity", *_PRICES, "l_tax", "l_shipdate")
    items = _with_revenue(items[items.l_shipdate <= np.datetime64("1998-09-02")])
    items = items.assign(charge=items.revenue * (1 + items.l_tax))
    groups = items.groupby(flags).agg(
        sum_qty=("l_quantity", "sum"),
        sum_base_price=("l_extendedprice", "sum"),
        sum_disc_price=("revenue", "sum"),
        sum_charge=("charge", "sum"),
        avg_qty=("l_quantity", "mean"),
        avg_price=("l_extendedprice", "mean"),
        avg_disc=("l_discount", "mean"),
        count_order=("l_quantity", "count"),
    )
    return groups.reset_index()


@_rows("-s_acctbal", "n_name", "s_name", "p_partkey", limit=100)
def _q02(read: Read) -> Any:
    about = ["s_name", "s_address", "s_phone", "s_acctbal", "s_comment"]
    parts = read("part", "p_partkey", "p_mfgr", "p_size", "p_type")
    parts = parts[(parts.p_size == 15) & parts.p_type.str.endswith("BRASS")]
    suppliers = _suppliers(read, _nations_of(read, "EUROPE"), *about)
    offers = read("partsupp", "ps_partkey", "ps_suppkey", "ps_supplycost")
    offers = offers.merge(parts, left_on="ps_partkey", right_on="p_partkey")
    offers = offers.merge(suppliers, left_on="ps_suppkey", right_on="s_suppkey")
    least = offers.groupby("p_partkey").agg(least=("ps_supplycost", "min")).reset_index()
    offers = offers.merge(least, on="p_partkey")
    offers = offers[offers.ps_supplycost == offers.least]
    columns = ["s_acctbal", "s_name", "n_name", "p_partkey", "p_mfgr", "s_address", "s_phone", "s_comment"]
    return offers[columns]


@_rows("-revenue", "o_orderdate", limit=10)
def _q03(read: Read) -> Any:
    day = np.datetime64("1995-03-15")
    customers = read("customer", "c_custkey", "c_mktsegment")
    customers = customers[customers.c_mktsegment == "BUILDING"]
    orders = read("orders", "o_orderkey", "o_custkey", "o_orderdate", "o_shippriority")
    orders = orders[orders.o_orderdate < day]
    orders = orders.merge(customers, left_on="o_custkey", right_on="c_custkey")
    items = read("lineitem", "l_orderkey", *_PRICES, "l_shipdate")
    items = _with_revenue(items[items.l_shipdate > day])
    items = items.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    groups = items.groupby(["l_orderkey", "o_orderdate", "o_shippriority"]).agg(revenue=("revenue", "sum"))
    return groups.reset_index()[["l_orderkey", "revenue", "o_orderdate", "o_shippriority"]]


@_rows("o_orderpriority")
def _q04(read: Read) -> Any:
    orders = read("orders", "o_orderkey", "o_orderdate", "o_orderpriority")
    orders = orders[_within(orders.o_orderdate, "1993-07-01", "1993-10-01")]
    items = read("lineitem", "l_orderkey", "l_commitdate", "l_receiptdate")
    late = items[items.l_commitdate < items.l_receiptdate][["l_orderkey"]].drop_duplicates()
    orders = orders.merge(late, left_on="o_orderkey", right_on="l_orderkey")
    return orders.groupby("o_orderpriority").agg(order_count=("o_orderkey", "count")).reset_index()


@_rows("-revenue")
def _q05(read: Read) -> Any:
    suppliers = _suppliers(read, _nations_of(read, "ASIA"))
    orders = read("orders", "o_orderkey", "o_custkey", "o_orderdate")
    orders = orders[_within(orders.o_orderdate, "1994-01-01", "1995-01-01")]
    customers = read("customer", "c_custkey", "c_nationkey")
    orders = orders.merge(customers, left_on="o_custkey", right_on="c_custkey")
    items = read("lineitem", "l_orderkey", "l_suppkey", *_PRICES)
    items = items.merge(suppliers, left_on="l_suppkey", right_on="s_suppkey")
    items = items.merge(orders, left_on=["l_orderkey", "s_nationkey"], right_on=["o_orderkey", "c_nationkey"])
    return _with_revenue(items).groupby("n_name").agg(revenue=("revenue", "sum")).reset_index()


@_number
def _q06(read: Read) -> Any:
    items = read("lineitem", "l_shipdate", "l_quantity", *_PRICES)
    items = items[_within(items.l_shipdate, "1994-01-01", "1995-01-01")]
    items = items[(items.l_discount >= 0.05) & (items.l_discount <= 0.07) & (items.l_quantity < 24)]
    return (items.l_extendedprice * items.l_discount).sum()


@_rows("supp_nation", "cust_nation", "l_year")
def _q07(read: Read) -> Any:
    nations = _nations(read, "FRANCE", "GERMANY")
    suppliers = _suppliers(read, nations).rename(columns={"n_name": "supp_nation"})
    suppliers = suppliers[["s_suppkey", "supp_nation"]]
    customers = read("customer", "c_custkey", "c_nationkey")
    customers = customers.merge(nations, left_on="c_nationkey", right_on="n_nationkey")
    customers = customers.rename(columns={"n_name": "cust_nation"})[["c_custkey", "cust_nation"]]
    orders = read("orders", "o_orderkey", "o_custkey")
    orders = orders.merge(customers, left_on="o_custkey", right_on="c_custkey")
    items = read("lineitem", "l_orderkey", "l_suppkey", "l_shipdate", *_PRICES)
    items = items[_within(items.l_shipdate, "1995-01-01", "1997-01-01")]
    items = items.merge(suppliers, left_on="l_suppkey", right_on="s_suppkey")
    items = items.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    items = items[items.supp_nation != items.cust_nation]
    items = _with_revenue(items).assign(l_year=items.l_shipdate.dt.year)
    groups = items.groupby(["supp_nation", "cust_nation", "l_year"])
    return groups.agg(revenue=("revenue", "sum")).reset_index()


@_rows("o_year")
def _q08(read: Read) -> Any:
    parts = read("part", "p_partkey", "p_type")
    parts = parts[parts.p_type == "ECONOMY ANODIZED STEEL"]
    customers = read("customer", "c_custkey", "c_nationkey")
    american = _nations_of(read, "AMERICA")[["n_nationkey"]]
    customers = customers.merge(american, left_on="c_nationkey", right_on="n_nationkey")
    orders = read("orders", "o_orderkey", "o_custkey", "o_orderdate")
    orders = orders[_within(orders.o_orderdate, "1995-01-01", "1997-01-01")]
    orders = orders.merge(customers[["c_custkey"]], left_on="o_custkey", right_on="c_custkey")
    items = read("lineitem", "l_orderkey", "l_partkey", "l_suppkey", *_PRICES)
    items = items.merge(parts, left_on="l_partkey", right_on="p_partkey")
    items = items.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    items = items.merge(_suppliers(read, _nations(read)), left_on="l_suppkey", right_on="s_suppkey")
    items = _with_revenue(items).assign(o_year=items.o_orderdate.dt.year)
    items = items.assign(brazil=items.revenue.where(items.n_name == "BRAZIL", 0.0))
    years = items.groupby("o_year").agg({"brazil": "sum", "revenue": "sum"}).reset_index()
    return years.assign(mkt_share=years.brazil / years.revenue)[["o_year", "mkt_share"]]


@_rows("nation", "-o_year")
def _q09(read: Read) -> Any:
    parts = read("part", "p_partkey", "p_name")
    parts = parts[parts.p_name.str.contains("green", regex=False)][["p_partkey"]]
    items = read("lineitem", "l_orderkey", "l_partkey", "l_suppkey", "l_quantity", *_PRICES)
    items = items.merge(parts, left_on="l_partkey", right_on="p_partkey")
    offers = read("partsupp", "ps_partkey", "ps_suppkey", "ps_supplycost")
    items = items.merge(offers, left_on=["l_partkey", "l_suppkey"], right_on=["ps_partkey", "ps_suppkey"])
    orders = read("orders", "o_orderkey", "o_orderdate")
    items = items.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    items = items.merge(_suppliers(read, _nations(read)), left_on="l_suppkey", right_on="s_suppkey")
    profit = _revenue(items) - items.ps_supplycost * items.l_quantity
    items = items.assign(sum_profit=profit, o_year=items.o_orderdate.dt.year)
    groups = items.rename(columns={"n_name": "nation"}).groupby(["nation", "o_year"])
    return groups.agg(sum_profit=("sum_profit", "sum")).reset_index()


@_rows("-revenue", limit=20)
def _q10(read: Read) -> Any:
    about = ["c_name", "c_acctbal", "c_phone", "c_address", "c_comment"]
    orders = read("orders", "o_orderkey", "o_custkey", "o_orderdate")
    orders = orders[_within(orders.o_orderdate, "1993-10-01", "1994-01-01")]
    items = read("lineitem", "l_orderkey", "l_returnflag", *_PRICES)
    items = _with_revenue(items[items.l_returnflag == "R"])
    items = items.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    # Of a customer there is one row: its key stands for all that the specification groups by.
    losses = items.groupby("o_custkey").agg(revenue=("revenue", "sum")).reset_index()
    customers = read("customer", "c_custkey", "c_nationkey", *about)
    customers = customers.merge(_nations(read), left_on="c_nationkey", right_on="n_nationkey")
    customers = customers.merge(losses, left_on="c_custkey", right_on="o_custkey")
    columns = ["c_custkey", "c_name", "revenue", "c_acctbal", "n_name", "c_address", "c_phone", "c_comment"]
    return customers[columns]


@_rows("-value")
def _q11(read: Read) -> Any:
    offers = read("partsupp", "ps_partkey", "ps_suppkey", "ps_availqty", "ps_supplycost")
    offers = offers.merge(
        _suppliers(read, _nations(read, "GERMANY")), left_on="ps_suppkey", right_on="s_suppkey"
    )
    offers = offers.assign(value=offers.ps_supplycost * offers.ps_availqty)
    parts = offers.groupby("ps_partkey").agg(value=("value", "sum")).reset_index()
    return parts[parts.value > offers.value.sum() * 0.0001]


@_rows("l_shipmode")
def _q12(read: Read) -> Any:
    items = read("lineitem", "l_orderkey", "l_shipmode", "l_shipdate", "l_commitdate", "l_receiptdate")
    items = items[items.l_shipmode.isin(["MAIL", "SHIP"])]
    items = items[(items.l_shipdate < items.l_commitdate) & (items.l_commitdate < items.l_receiptdate)]
    items = items[_within(items.l_receiptdate, "1994-01-01", "1995-01-01")]
    orders = read("orders", "o_orderkey", "o_orderpriority")
    items = items.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    is_high = items.o_orderpriority.isin(["1-URGENT", "2-HIGH"])
    items = items.assign(high_line_count=is_high.astype(int), low_line_count=(~is_high).astype(int))
    return items.groupby("l_shipmode")[["high_line_count", "low_line_count"]].sum().reset_index()


@_rows("-custdist", "-c_count")
def _q13(read: Read) -> Any:
    orders = read("orders", "o_orderkey", "o_custkey", "o_comment")
    orders = orders[~orders.o_comment.str.contains("special.*requests")]
    counts = orders.groupby("o_custkey").agg(c_count=("o_orderkey", "count")).reset_index()
    customers = read("customer", "c_custkey")
    customers = customers.merge(counts, left_on="c_custkey", right_on="o_custkey", how="left")
    customers = customers.assign(c_count=customers.c_count.fillna(0).astype(int))
    return customers.groupby("c_count").agg(custdist=("c_custkey", "count")).reset_index()


@_number
def _q14(read: Read) -> Any:
    items = read("lineitem", "l_partkey", "l_shipdate", *_PRICES)
    items = _with_revenue(items[_within(items.l_shipdate, "1995-09-01", "1995-10-01")])
    items = items.merge(read("part", "p_partkey", "p_type"), left_on="l_partkey", right_on="p_partkey")
    promoted = items[items.p_type.str.startswith("PROMO")]
    return 100 * promoted.revenue.sum() / items.revenue.sum()


@_rows("s_suppkey")
def _q15(read: Read) -> Any:
    items = read("lineitem", "l_suppkey", "l_shipdate", *_PRICES)
    items = _with_revenue(items[_within(items.l_shipdate, "1996-01-01", "1996-04-01")])
    totals = items.groupby("l_suppkey").agg(total_revenue=("revenue", "sum")).reset_index()
    best = totals[totals.total_revenue == totals.total_revenue.max()]
    suppliers = read("supplier", "s_suppkey", "s_name", "s_address", "s_phone")
    return suppliers.merge(best, left_on="s_suppkey", right_on="l_suppkey").drop(columns="l_suppkey")


@_rows("-supplier_cnt", "p_brand", "p_type", "p_size")
def _q16(read: Read) -> Any:
    kinds = ["p_brand", "p_type", "p_size"]
    parts = read("part", "p_partkey", *kinds)
    parts = parts[(parts.p_brand != "Brand#45") & parts.p_size.isin([49, 14, 23, 45, 19, 3, 36, 9])]
    parts = parts[~parts.p_type.str.startswith("MEDIUM POLISHED")]
    suppliers = read("supplier", "s_suppkey", "s_comment")
    suppliers = suppliers[~suppliers.s_comment.str.contains("Customer.*Complaints")]
    offers = read("partsupp", "ps_partkey", "ps_suppkey")
    offers = offers.merge(parts, left_on="ps_partkey", right_on="p_partkey")
    offers = offers.merge(suppliers[["s_suppkey"]], left_on="ps_suppkey", right_on="s_suppkey")
    counts = offers.groupby(kinds).ps_suppkey.nunique().reset_index()
    return counts.rename(columns={"ps_suppkey": "supplier_cnt"})


@_number
def _q17(read: Read) -> Any:
    parts = read("part", "p_partkey", "p_brand", "p_container")
    parts = parts[(parts.p_brand == "Brand#23") & (parts.p_container == "MED BOX")]
    items = read("lineitem", "l_partkey", "l_quantity", "l_extendedprice")
    items = items.merge(parts[["p_partkey"]], left_on="l_partkey", right_on="p_partkey")
    means = items.groupby("p_partkey").agg(mean=("l_quantity", "mean")).reset_index()
    items = items.merge(means, on="p_partkey")
    return items[items.l_quantity < 0.2 * items["mean"]].l_extendedprice.sum() / 7


@_rows("-o_totalprice", "o_orderdate", limit=100)
def _q18(read: Read) -> Any:
    items = read("lineitem", "l_orderkey", "l_quantity")
    totals = items.groupby("l_orderkey").agg(quantity=("l_quantity", "sum")).reset_index()
    totals = totals[totals.quantity > 300].rename(columns={"quantity": "sum(l_quantity)"})
    orders = read("orders", "o_orderkey", "o_custkey", "o_orderdate", "o_totalprice")
    orders = orders.merge(totals, left_on="o_orderkey", right_on="l_orderkey")
    orders = orders.merge(read("customer", "c_custkey", "c_name"), left_on="o_custkey", right_on="c_custkey")
    return orders[["c_name", "c_custkey", "o_orderkey", "o_orderdate", "o_totalprice", "sum(l_quantity)"]]


@_number
def _q19(read: Read) -> Any:
    items = read("lineitem", "l_partkey", "l_quantity", "l_shipmode", "l_shipinstruct", *_PRICES)
    items = items[items.l_shipmode.isin(["AIR", "AIR REG"]) & (items.l_shipinstruct == "DELIVER IN PERSON")]
    parts = read("part", "p_partkey", "p_brand", "p_container", "p_size")
    items = items.merge(parts[parts.p_size >= 1], left_on="l_partkey", right_on="p_partkey")

    def is_like(brand: str, containers: list[str], quantity: int, size: int) -> Any:
        is_of = (items.p_brand == brand) & items.p_container.isin(containers) & (items.p_size <= size)
        return is_of & (items.l_quantity >= quantity) & (items.l_quantity <= quantity + 10)

    small = is_like("Brand#12", ["SM CASE", "SM BOX", "SM PACK", "SM PKG"], 1, 5)
    medium = is_like("Brand#23", ["MED BAG", "MED BOX", "MED PKG", "MED PACK"], 10, 10)
    large = is_like("Brand#34", ["LG CASE", "LG BOX", "LG PACK", "LG PKG"], 20, 15)
    return _revenue(items[small | medium | large]).sum()


@_rows("s_name")
def _q20(read: Read) -> Any:
    parts = read("part", "p_partkey", "p_name")
    parts = parts[parts.p_name.str.startswith("forest")][["p_partkey"]]
    offers = read("partsupp", "ps_partkey", "ps_suppkey", "ps_availqty")
    offers = offers.merge(parts, left_on="ps_partkey", right_on="p_partkey")
    items = read("lineitem", "l_partkey", "l_suppkey", "l_quantity", "l_shipdate")
    items = items[_within(items.l_shipdate, "1994-01-01", "1995-01-01")]
    sold = items.groupby(["l_partkey", "l_suppkey"]).agg(sold=("l_quantity", "sum")).reset_index()
    offers = offers.merge(sold, left_on=["ps_partkey", "ps_suppkey"], right_on=["l_partkey", "l_suppkey"])
    offers = offers[offers.ps_availqty > 0.5 * offers.sold][["ps_suppkey"]].drop_duplicates()
    suppliers = _suppliers(read, _nations(read, "CANADA"), "s_name", "s_address")
    return suppliers.merge(offers, left_on="s_suppkey", right_on="ps_suppkey")[["s_name", "s_address"]]


@_rows("-numwait", "s_name", limit=100)
def _q21(read: Read) -> Any:
    items = read("lineitem", "l_orderkey", "l_suppkey", "l_commitdate", "l_receiptdate")
    late = items[items.l_receiptdate > items.l_commitdate][["l_orderkey", "l_suppkey"]]
    suppliers_of = {"first": ("l_suppkey", "min"), "last": ("l_suppkey", "max")}
    of_all = items.groupby("l_orderkey").agg(**suppliers_of).reset_index()
    of_all = of_all[of_all["first"] != of_all["last"]][["l_orderkey"]]
    of_late = late.groupby("l_orderkey").agg(**suppliers_of).reset_index()
    of_late = of_late[of_late["first"] == of_late["last"]][["l_orderkey"]]
    orders = read("orders", "o_orderkey", "o_orderstatus")
    orders = orders[orders.o_orderstatus == "F"][["o_orderkey"]]
    suppliers = _suppliers(read, _nations(read, "SAUDI ARABIA"), "s_name")
    waiting = late.merge(suppliers, left_on="l_suppkey", right_on="s_suppkey")
    waiting = waiting.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    waiting = waiting.merge(of_all, on="l_orderkey").merge(of_late, on="l_orderkey")
    return waiting.groupby("s_name").agg(numwait=("l_orderkey", "count")).reset_index()


@_rows("cntrycode")
def _q22(read: Read) -> Any:
    customers = read("customer", "c_custkey", "c_phone", "c_acctbal")
    customers = customers.assign(cntrycode=customers.c_phone.str.slice(0, 2))
    customers = customers[customers.cntrycode.isin(["13", "31", "23", "29", "30", "18", "17"])]
    mean = customers[customers.c_acctbal > 0].c_acctbal.mean()
    buyers = read("orders", "o_custkey").drop_duplicates()
    rich = customers[customers.c_acctbal > mean]
    rich = rich.merge(buyers, left_on="c_custkey", right_on="o_custkey", how="left")
    groups = rich[rich.o_custkey.isna()].groupby("cntrycode")
    return groups.agg(numcust=("c_custkey", "count"), totacctbal=("c_acctbal", "sum")).reset_index()


#: All queries, in the order of the specification.
QUERIES: tuple[Query, ...] = (
    *(_q01, _q02, _q03, _q04, _q05, _q06, _q07, _q08, _q09, _q10, _q11),
    *(_q12, _q13, _q14, _q15, _q16, _q17, _q18, _q19, _q20, _q21, _q22),
)
