"""Text back into graphs and plans: `parse_plan(str(plan)) == plan`, exactly.

The values print themselves (`str`); what they print is read here, row by row, and comments are skipped. Every error is
a PlanFileError that names the line and what was expected there.
"""

from collections.abc import Callable
from typing import TypeVar

from elixir_compile.errors import InvalidPlan, PlanFileError
from elixir_compile.hardware.cluster import MOST_RANKS
from elixir_compile.ir.bucket import Activations, Bucket, Placement
from elixir_compile.ir.graph import Op, StepGraph, Storage
from elixir_compile.ir.kinds import (
    BucketId,
    GroupId,
    Kernel,
    Kind,
    OpId,
    Phase,
    RegionId,
    Saving,
    StorageId,
    Tier,
    Update,
    Verb,
)
from elixir_compile.ir.plan import PLAN_FORMAT, Decision, Plan, Prediction
from elixir_compile.ir.schedule import Action, Region, Schedule
from elixir_compile.ir.words import Page, Row

_Read = TypeVar("_Read")


def parse_graph(text: str) -> StepGraph:
    """Return the graph that `text` prints; PlanFileError names the line that is not right."""
    page = Page(text)
    name = page.title("graph").name("the graph's name")
    page.advance()
    symbols = _symbols(page)
    storages = _section(page, "storages", _storage)
    outputs = _section(page, "outputs", lambda row: StorageId(row.name("a storage")))
    aliases = _section(page, "aliases", lambda row: (row.name("a value"), StorageId(row.name("a storage"))))
    ops = _section(page, "ops", _op)
    page.end()
    return _valid(
        lambda: StepGraph(name=name, ops=ops, storages=storages, outputs=outputs, aliases=aliases, symbols=symbols),
        "the whole text",
    )


def parse_plan(text: str) -> Plan:
    """Return the plan that `text` prints; PlanFileError names the line that is not right."""
    page = Page(text)
    row = page.title("plan")
    name = row.name("the plan's name")
    row.keyword("on")
    cluster = row.name("the machine")
    graph, budget_bytes, base_bytes = _versions(page.advance())
    prediction = _prediction(page)
    planner, bound_s, gib_saves_s = _planner(page.advance())
    page.advance()
    binding = _lines(page, "binding")
    formula = _lines(page, "formula")
    loss_chunks = _count(page, "loss")
    num_copies = _count(page, "copies")
    update = _update(page)
    symbols = _symbols(page)
    placed = _section(page, "buckets", _bucket)
    activations = _section(page, "activations", _activations) if page.row.at("activations") else ()
    regions = _section(page, "regions", _region)
    schedules: list[Schedule] = []
    while page.row.at("schedule"):
        schedules.append(_schedule(page))
    decisions = _decisions(page)
    page.end()
    return _valid(
        lambda: Plan(
            name=name,
            graph=graph,
            cluster=cluster,
            num_copies=num_copies,
            budget_bytes=budget_bytes,
            base_bytes=base_bytes,
            buckets=tuple(bucket for bucket, _ in placed),
            placements=tuple(placement for _, placement in placed),
            activations=activations,
            loss_chunks=loss_chunks,
            update=update,
            regions=regions,
            schedules=tuple(schedules),
            decisions=decisions,
            prediction=prediction,
            planner=planner,
            bound_s=bound_s,
            binding=binding,
            gib_saves_s=gib_saves_s,
            formula="".join(formula),
            symbols=symbols,
        ),
        "the whole text",
    )


def _count(page: Page, title: str) -> int:
    """Read the row `title` that says how many there are, where there is one; else there is one."""
    if not page.row.skip(title):
        return 1
    count = page.row.integer()
    page.advance()
    return count


def _update(page: Page) -> Update:
    """Read the row that says when buckets are updated, where there is one."""
    if not page.row.skip("update"):
        return Update.AFTER_BACKWARD
    update = page.row.choice(Update)
    page.advance()
    return update


def _symbols(page: Page) -> tuple[tuple[str, int], ...]:
    """Read the section that gives symbols their values, where there is one."""
    if not page.row.at("symbols"):
        return ()
    return _section(page, "symbols", lambda row: (row.name("a symbol"), row.integer()))


def _section(page: Page, title: str, read: Callable[[Row], _Read]) -> tuple[_Read, ...]:
    """Read the rows below `title`, each with `read`."""
    page.title(title)
    found: list[_Read] = []
    for row in page.rows():
        found.append(_valid(lambda row=row: read(row), f"line {row.number}"))
        row.end()
    return tuple(found)


def _valid(make: Callable[[], _Read], where: str) -> _Read:
    """Return what `make` returns; a value that contradicts itself is an error of the text."""
    try:
        return make()
    except InvalidPlan as error:
        raise PlanFileError(where, "values that agree", str(error)) from error


def _storage(row: Row) -> Storage:
    return Storage(
        id=StorageId(row.name("a storage")),
        kind=row.choice(Kind),
        dtype=row.name("a dtype"),
        nbytes=row.integer(),
        size=row.name("an expression") if row.skip("size") else "",
        of=StorageId(row.name("a parameter")) if row.skip("of") else None,
    )


def _op(row: Row) -> Op:
    return Op(
        id=OpId(row.name("an op")),
        target=row.name("the op's target"),
        phase=row.choice(Phase),
        reads=tuple(map(StorageId, row.names())) if row.skip("reads") else (),
        writes=tuple(map(StorageId, row.names())) if row.skip("writes") else (),
        flops=row.integer() if row.skip("flops") else 0,
        moved_bytes=row.integer() if row.skip("moved") else 0,
        module=row.name("a module") if row.skip("module") else "",
        source=row.name("a file and line") if row.skip("source") else "",
        flops_size=row.name("an expression") if row.skip("size") else "",
        kernel=row.choice(Kernel) if row.skip("kernel") else Kernel.OPAQUE,
        once=row.skip("once"),
    )


def _versions(row: Row) -> tuple[str, int, int]:
    row.keyword("format")
    row.constant(PLAN_FORMAT)
    row.keyword("graph")
    graph = row.name("the graph's fingerprint")
    row.keyword("budget")
    budget_bytes = row.integer()
    return graph, budget_bytes, row.integer() if row.skip("base") else 0


def _prediction(page: Page) -> Prediction:
    """Read the rows of seconds and of peaks."""
    step_s, exposed_s, hidden_share = _seconds(page.advance())
    peak_bytes, peak_at, host_bytes = _peaks(page.advance())
    return _valid(
        lambda: Prediction(
            step_s=step_s,
            exposed_s=exposed_s,
            hidden_share=hidden_share,
            device_peak_bytes=peak_bytes,
            device_peak_at=peak_at,
            host_peak_bytes=host_bytes,
        ),
        "the prediction",
    )


def _planner(row: Row) -> tuple[str, float | None, float | None]:
    row.keyword("planner")
    name = row.name("the planner")
    bound_s = row.real() if row.skip("bound") else None
    if not row.skip("gib"):
        return name, bound_s, None
    row.keyword("saves")
    return name, bound_s, row.real()


def _lines(page: Page, keyword: str) -> tuple[str, ...]:
    """Read the rows that open with `keyword` and hold one text."""
    found: list[str] = []
    while page.row.at(keyword):
        page.row.keyword(keyword)
        found.append(page.row.name("a text"))
        page.advance()
    return tuple(found)


def _seconds(row: Row) -> tuple[float, float, float]:
    row.keyword("step")
    step_s = row.real()
    row.keyword("exposed")
    exposed_s = row.real()
    row.keyword("hidden")
    hidden_share = row.real()
    return step_s, exposed_s, hidden_share


def _peaks(row: Row) -> tuple[int, OpId, int]:
    row.keyword("peak")
    peak_bytes = row.integer()
    row.keyword("at")
    peak_at = OpId(row.name("an op"))
    row.keyword("host")
    return peak_bytes, peak_at, row.integer()


def _bucket(row: Row) -> tuple[Bucket, Placement]:
    name = BucketId(row.name("a bucket"))
    dtype = row.name("a dtype")
    row.keyword("numel")
    numel = row.integer()
    row.keyword("bytes")
    nbytes = row.integer()
    row.keyword("state")
    state_nbytes = row.integer()
    trainable = row.either("trainable", "frozen")
    group = row.integer() if row.skip("group") else 0
    sum_nbytes = row.integer() if row.skip("sums") else 0
    reduce_dtype = row.name("a dtype") if row.skip("reduce") else None
    row.keyword("param")
    param = row.choice(Tier)
    row.keyword("optim")
    optim = row.choice(Tier)
    streamed = row.skip("streamed")
    placement = Placement(bucket=name, param=param, optim=optim, streamed=streamed, resident=row.skip("resident"))
    row.keyword("shards")
    shard_numels = _shards(row)
    row.keyword("params")
    bucket = Bucket(
        id=name,
        params=tuple(map(StorageId, row.names())),
        numel=numel,
        nbytes=nbytes,
        state_nbytes=state_nbytes,
        dtype=dtype,
        trainable=trainable,
        shard_numels=shard_numels,
        group=group,
        sum_nbytes=sum_nbytes,
        reduce_dtype=reduce_dtype,
    )
    return bucket, placement


def _shards(row: Row) -> tuple[int, ...]:
    """Read numbers up to the next keyword, each alone or as `128 x 1021`: so many ranks with as many elements."""
    found: list[int] = []
    while not row.at("params"):
        numel = row.integer()
        count = row.integer() if row.skip("x") else 1
        if len(found) + count > MOST_RANKS:
            row.fail(f"at most {MOST_RANKS} ranks", len(found) + count)
        found += [numel] * count
    return tuple(found)


def _activations(row: Row) -> Activations:
    name, saving = GroupId(row.name("activations")), row.choice(Saving)
    row.keyword("bytes")
    nbytes = row.integer()
    row.keyword("storages")
    return Activations(id=name, storages=tuple(map(StorageId, row.names())), nbytes=nbytes, saving=saving)


def _region(row: Row) -> Region:
    return Region(
        id=RegionId(row.name("a region")),
        phase=row.choice(Phase),
        first=OpId(row.name("the region's first op")),
        last=OpId(row.name("the region's last op")),
        buckets=tuple(map(BucketId, row.names())) if row.skip("buckets") else (),
    )


def _schedule(page: Page) -> Schedule:
    row = page.title("schedule")
    row.keyword("rank")
    rank = row.integer()
    actions: list[Action] = []
    for row in page.rows():
        verb, what = row.choice(Verb), row.name("what to act on")
        actions.append(Action(verb=verb, what=what, micro_batch=0 if row.is_done() else row.integer("@")))
        row.end()
    return Schedule(rank=rank, actions=tuple(actions))


def _decisions(page: Page) -> tuple[Decision, ...]:
    """Read decisions: a row that names subject and choice, then `because`, then any number of `rejected`."""
    page.title("decisions")
    rows = page.rows()
    found: list[Decision] = []
    while rows:
        row, because = rows.pop(0), rows.pop(0) if rows else page.row
        subject, choice = row.name("a subject"), row.name("a choice")
        row.keyword("cost")
        cost_s = row.real()
        row.keyword("saves")
        saves_bytes = row.integer(is_signed=True)
        row.end()
        because.keyword("because")
        reason = because.name("the reason")
        because.end()
        rejected: list[str] = []
        while rows and rows[0].at("rejected"):
            other = rows.pop(0)
            other.keyword("rejected")
            rejected.append(other.name("what was rejected"))
            other.end()
        found.append(
            Decision(
                subject=subject,
                choice=choice,
                because=reason,
                cost_s=cost_s,
                saves_bytes=saves_bytes,
                rejected=tuple(rejected),
            )
        )
    return tuple(found)
