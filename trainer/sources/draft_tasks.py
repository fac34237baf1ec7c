"""Drafts a folder with task tables: which tables are tasks, then which are edges and nodes, then how they are learned.

A task table has ids of one node table, each in several rows, a time, and a column that looks like an outcome or lists
nodes. Other tables with ids of nodes become nodes, with an edge from each id, so that their time is one of nodes: rows
without an id of their own, too, unless they have no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from trainer.sources.draft_columns import (
    OUTCOMES,
    Drafted,
    about_files,
    checked_split,
    dangling,
    draft_of,
    edge_tables,
    node_table,
    other_columns,
)
from trainer.sources.table_columns import list_type, time_sql
from trainer.sources.table_database import quoted
from trainer.sources.table_facts import Column, FoundTable, Keys, is_within, key_sql, likeness, sure_keys


@dataclass
class _Task:
    id: Column
    entity: FoundTable
    time: Column
    label: Column
    targets: FoundTable | None = None  #: the table of the nodes that the label lists; None: it is no list


def draft_with_tasks(found: Sequence[FoundTable], named: Sequence[FoundTable]) -> dict[str, Any]:
    """Draft a folder with task tables and what happened to their entities; {} if there are none.

    ``named``: the tables with an id. ``learn`` of ``comments`` has what learns the first task (task, metrics), and
    ``links`` an edge table for recommendations, if there can be one.
    """
    keys = {table: sure_keys(table, [one for one in named if one is not table]) for table in found}
    referenced = {node for some in keys.values() for _, node in some}
    tasks: dict[FoundTable, _Task] = {}
    for table in found:
        events = [
            (node, other.time) for other in found for _, node in keys[other]
            if other is not table and other.time is not None
        ]  # fmt: skip
        if table not in referenced and (task := _task_of(table, keys[table], named, events)) is not None:
            tasks[table], keys[table] = task, [(task.id, task.entity)]

    # edges have two ids and neither one of their own nor a time; nodes have an id of their own, or one of others and a
    # time
    rest = [table for table in found if table not in tasks]
    edges = [one for one in rest if len(keys[one]) == 2 and not one.own_id(keys[one]) and not one.time]
    nodes = [one for one in rest if one not in edges and (one.own_id(keys[one]) or (keys[one] and one.time))]
    keys = {table: [(column, node) for column, node in some if node in nodes] for table, some in keys.items()}
    tasks = {
        table: task for table, task in tasks.items()
        if task.entity in nodes and (task.targets is None or task.targets in nodes)
    }  # fmt: skip
    edges = [table for table in edges if len(keys[table]) == 2]
    linked = [table for table in nodes if keys[table]]
    if not tasks or not (linked or edges):
        return {}

    of_edges = edge_tables(edges, linked, keys)
    types = {table.node_type for table in nodes}
    of_tasks = {
        f"{table.type_name}_task" if table.type_name in types else table.type_name: _task_table(table, task)
        for table, task in tasks.items()
    }
    first = next(iter(tasks.values()))
    links = _links(linked, keys, first.entity)
    # the ends of links first, so that the tables that recommendations do without stand together
    nodes.sort(key=lambda table: table.node_type not in links.get("name", "").split("__"))
    of_nodes = {table.node_type: node_table(table, keys[table]) for table in nodes}
    for table, task in tasks.items():
        _leave_out_late_time(table, task, *of_nodes[task.entity.node_type])
    why = "it has neither a column with a different value in each row, nor ids of nodes and a time in each row"
    unused = [table for table in found if table not in (*nodes, *edges, *tasks)]
    drafted = draft_of(of_nodes, of_edges, unused, why)
    drafted["tasks"] = {name: options for name, (options, _) in of_tasks.items()}
    comments = drafted["comments"]
    comments["tasks"] = {name: notes for name, (_, notes) in of_tasks.items()}
    for table in linked:
        if not table.own_id(keys[table]):
            note = "rowid: the rows have no id of their own and are numbered"
            comments["nodes"].setdefault(table.node_type, []).append(note)

    if first.targets is not None:
        comments["learn"] = ["link", ["recall@10", "ndcg@10", "map@10"]]
    elif first.label.is_class:
        metrics = ["roc_auc", "accuracy"] if first.label.distinct == 2 else ["accuracy", "macro_f1"]
        comments["learn"] = ["classification", metrics]
    else:
        drafted |= {"num_classes": 0, "target": next(iter(of_tasks))}
        comments["learn"] = ["regression", ["mae", "rmse"]]
    # a task with targets is a recommendation itself
    if links and first.targets is None and not any("label" in table for table in drafted["nodes"].values()):
        comments["links"] = links
    return drafted


def _task_of(
    table: FoundTable, keys: Keys, nodes: Sequence[FoundTable], events: Sequence[tuple[FoundTable, Column]]
) -> _Task | None:  # fmt: skip
    """Return what a task table predicts, or None if it is no task table.

    ``events``: the nodes that other tables name, and the times of these tables.
    """
    time = table.time
    if time is None or time.missing:
        return None
    repeated = len(keys) == 1 and table.rows >= 2 * keys[0][0].distinct
    few_times = 20 * time.distinct <= table.rows  # in many rows, as of nothing that happens by itself
    split = next((one for one in table.columns if one.is_split), None)
    rest = [one for one in table.columns if one is not time and one is not split]

    # a column of lists of ids
    for column in rest if repeated and table.id is None else ():
        element = list_type(column.type)
        plain = element is not None and list_type(element) is None and (element == "VARCHAR" or "INT" in element)
        fits = [node for node in nodes if plain and node.id and is_within(table, column, node, node.id)]
        if fits:
            return _Task(*keys[0], time, column, max(fits, key=lambda node: likeness(column, node)))

    # one id in each row, if the entity is named by events of many more times
    if len(keys) == 2 and len(rest) == 2 and few_times and table.id is None:
        (column, entity), (label, targets) = sorted(keys, key=lambda key: table.columns.index(key[0]))
        if max((of.distinct for node, of in events if node is entity), default=0) >= 5 * time.distinct:
            return _Task(column, entity, time, label, targets)

    # a column called as an outcome or as the file, or the only one beside entity and time
    if not repeated:
        return None
    rest = [
        one for one in table.columns
        if one not in (keys[0][0], time, table.id) and one.kind in ("number", "text") and one.distinct > 1
        and not one.is_split and (one.kind == "number" or one.is_class)
    ]  # fmt: skip
    stem = table.type_name
    for one in rest:
        name = one.name.lower()
        if OUTCOMES.fullmatch(name) or (min(len(name), len(stem)) > 2 and (name in stem or stem in name)):
            return _Task(*keys[0], time, one)
    return _Task(*keys[0], time, rest[0]) if len(rest) == 1 and few_times else None


def _task_table(table: FoundTable, task: _Task) -> Drafted:
    files, entity = dict(table.file_keys), task.entity.node_type
    drafted: dict[str, Any] = {
        "table": files.pop("files"), **files, "entity": entity, "id": task.id.name, "time": task.time.name,
        "label": task.label.name,
    }  # fmt: skip
    what, notes, dropped = f"{task.label.name} is predicted", list[str](), list[str]()
    rest = [one for one in table.columns if one not in (task.id, task.time, task.label, table.id)]
    split = named = next((one for one in rest if one.is_split), None)
    if task.targets is not None:
        drafted["targets"] = task.targets.node_type
        what = f"the {task.targets.node_type} nodes in {task.label.name} are predicted"
    else:
        split = checked_split(table, split, task.label, dropped)
    drafted["split"] = split.name if split else _split_at(table, task)
    if not split and "val_time" in drafted["split"]:
        notes.append("split: val begins after 70% of the labelled rows, test after 85%")
    label = task.label if task.targets is None else None
    more, of_others = other_columns(table, [one for one in rest if one is not named], True, label)
    if any(key in more for key in ("features", "one_hot", "categories")):
        notes.append("columns that are known only after the row's time must not be features")
    lost, unknown = dangling(table, [(task.id, task.entity)], "rows of the task")
    about = f"{table.file}: rows about {entity} nodes at a time, {what}: a task table; remove it if not"
    return drafted | more | lost, [about, *about_files(table), *of_others, *notes, *dropped, *unknown]


def _split_at(table: FoundTable, task: _Task) -> dict[str, Any]:
    """Return the times, if possible dates, at which val and test begin; shares of the rows if there are few times."""
    low, by_rows, last = table.scan.database.rows(
        f"SELECT min(t), quantile_disc(t, [0.7, 0.85]), list_sort(list(DISTINCT t))[-2:] FROM "
        f"(SELECT {time_sql(table.scan, task.time.name)} AS t FROM {table.scan.sql} "
        f"WHERE {quoted(task.label.name)} IS NOT NULL)",
        table.scan.where,
    )[0]
    is_moment = task.time.kind == "time"
    for step in (86_400, 1) if is_moment else (1,):
        for found in (by_rows, last):
            val, test = (int(each) // step * step for each in (*found, *found)[:2])
            if low < val < test:
                shown: list[Any] = [val, test]
                if is_moment and val >= -62_135_596_800 and test <= 253_402_300_799:  # years 1 to 9999, as in Python
                    texts = [datetime.fromtimestamp(each, timezone.utc).replace(tzinfo=None) for each in shown]
                    shown = [str(each.date() if step > 1 else each) for each in texts]
                return dict(zip(("val_time", "test_time"), shown, strict=True))
    return {"train": 0.7, "val": 0.15, "test": 0.15}


def _leave_out_late_time(table: FoundTable, task: _Task, of_node: dict[str, Any], notes: list[str]) -> None:
    """Remove a time of the entities that more than a tenth of the rows are earlier than: these would not see them.

    It is not when an entity is first known, but when it was last seen or changed.
    """
    node = task.entity
    if (name := of_node.get("time")) is None:
        return
    assert node.id is not None
    rows = f"SELECT {key_sql(quoted(task.id.name))} AS id, {time_sql(table.scan, task.time.name)} AS t"
    nodes = f"SELECT {key_sql(quoted(node.id.name))} AS id, {time_sql(node.scan, name)} AS t FROM {node.scan.sql}"
    (early,) = table.scan.database.rows(
        f"SELECT count(*) FROM ({rows} FROM {table.scan.sql}) r JOIN ({nodes}) n ON r.id = n.id WHERE n.t > r.t",
        table.scan.where,
    )[0]
    if 10 * early > table.rows:
        del of_node["time"]
        notes.append(
            f"{name} is not used: {early:,} of the {table.rows:,} rows of {table.file} are earlier, and would not see "
            "their node; as a time it must be when a node is first known"
        )


def _links(linked: Sequence[FoundTable], keys: Mapping[FoundTable, Keys], entity: FoundTable) -> dict[str, Any]:
    """Return the draft of an edge table for recommendations between the two node types that most rows name; or {}."""
    found: dict[tuple[FoundTable, FoundTable], list[tuple[FoundTable, Column, Column]]] = {}
    for table in linked:
        of = {node: column for column, node in reversed(keys[table])}
        ends = sorted(of, key=lambda node: (node is not entity, table.columns.index(of[node])))
        if len(ends) >= 2:
            a, b = ends[:2]
            found.setdefault((a, b), []).append((table, of[a], of[b]))
    if not found:
        return {}
    a, b = max(found, key=lambda pair: sum(table.rows for table, *_ in found[pair]))
    table, source, target = max(found[a, b], key=lambda one: one[0].rows)
    options = {**table.file_keys, "source": source.name, "target": target.name}
    if table.time is not None:
        options["time"] = table.time.name
    return {"name": f"{a.node_type}__{table.type_name}__{b.node_type}", "table": options}
