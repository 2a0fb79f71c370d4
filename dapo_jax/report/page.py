"""The page of runs or of evaluations: one HTML file with its pictures in it, without scripts."""

import base64
import contextlib
import io
import itertools
import json
import math
import pathlib
import zlib
from collections.abc import Iterator, Mapping, Sequence

import jinja2
import matplotlib
from matplotlib.figure import Figure

from dapo_jax.report import compare, plots, statistics
from dapo_jax.report.runs import Run, by_arm, complete, flatten, spans, summary_lines, thinned
from dapo_jax.run.files import atomic_file, read_rollouts, read_rows
from dapo_jax.run.metrics import METRICS, Metric
from dapo_jax.tasks.readers import PROMPT_TEMPLATE

TABLE_ROWS = 30  # rows of metrics shown for a run
RUNS_WITH_ROWS = 4  # a page of more runs shows no single rows
SAMPLE_TOKENS = 30_000  # on a page
SAMPLE_STEPS = 9  # of a run
SAMPLES = 12  # of a step
READ_RESPONSES = 1_000  # of a step's file: the first ones
HEAD_TOKENS, TAIL_TOKENS = 800, 400  # shown of a response
HEAD, TAIL = 3_000, 1_500  # characters shown of a response without its tokens
UNLIKELY = (0.9, 0.5, 0.2, 0.05)  # probabilities between the colours of tokens
CODE = ("commit", "changed", "versions", "devices")  # of a start's line
VERDICTS = ("right", "wrong", "truncated")
COUNTED = {  # metrics that are 0 in a step without a fault
    "updates_skipped": "updates left out, not finite",
    "updates_empty": "updates without any weight",
    "responses_not_finite": "responses with a log-probability that is not finite",
    "verdicts/gave_up": "responses that the grader gave up on",
}


def write(path: pathlib.Path, text: str) -> None:
    """Writes a page, complete or not at all."""
    with atomic_file(path) as file:
        file.write(text.encode(errors="backslashreplace"))  # responses may hold any characters


def html(title: str, **sections) -> str:
    """Renders page.html.j2 with the given sections; all text in them is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"verdict": verdict, "problem_of": problem_of, "tokens_of": tokens_of}
    return environment.get_template("page.html.j2").render(title=title, **sections)


def render(runs: Mapping[str, Run], *, unfinished: Sequence[Mapping] = ()) -> str:
    """Renders the page of runs by label.

    unfinished: points of a sweep that did not end with status 0.
    """
    arms, (finished, short) = by_arm(runs), complete(runs)
    with_rows = runs if len(runs) <= RUNS_WITH_ROWS else {}
    many = len(arms) > RUNS_WITH_ROWS
    return html(
        f"DAPO: {f'{len(runs)} runs of {len(arms)} arms' if many else ', '.join(arms)}",
        runs=runs,
        arms=list(arms),
        summaries={label: summary_lines(run) for label, run in runs.items()},
        seeds={arm: len(of_seed) for arm, of_seed in by_arm(finished).items()},
        ends=ends(finished) if finished and len(runs) > 1 else {},
        short=short,
        equal=compare.equal_lines(finished),
        last_rows=statistics.LAST_ROWS,
        differences=[(key, *values) for key, values in differences(runs).items()],
        pictures=[picture(plots.curves(runs)), picture(plots.accuracy_vs_tokens(runs))],
        samples=samples(runs),
        likely=UNLIKELY,
        events=[(label, *event) for label, run in runs.items() for event in events(run)],
        unfinished=[
            (p["arm"], p["seed"], p.get("status"), (p.get("error") or ["-"])[-1])
            for p in unfinished
        ],
        rows={label: _rows(run) for label, run in with_rows.items()},
    )


def picture(figure: Figure) -> str:
    """The figure as an SVG in a data URI: sharp at any width, and isolated from the page."""
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dapo"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _rows(run: Run) -> tuple[list[Metric], list[Mapping]]:
    """(the metrics of a run's rows, some of the rows)."""
    keys = dict.fromkeys(key for row in run.rows for key in row)
    known = {metric.key for metric in METRICS}
    metrics = [metric for metric in METRICS if metric.key in keys]
    others = [Metric(key, "", "") for key in keys if key not in known]
    return metrics + others, thinned(run.rows, limit=TABLE_ROWS)


def ends(runs: Mapping[str, Run]) -> dict[str, list[tuple[str, str, bool]]]:
    """Quantity -> for each arm its mean ± spread over seeds, and its difference from the first arm.

    The difference is a text with its paired 95 % interval, "" where there is none; the last item is
    True where that interval excludes zero.
    """
    arms, result = by_arm(runs), {}
    for quantity in compare.quantities(runs):
        of_arm = [compare.values(quantity, of_seed) for of_seed in arms.values()]
        result[quantity.name] = cells = []
        for i, of_seed in enumerate(of_arm):
            paired = compare.Comparison.of(of_seed, of_arm[0]).paired
            text = ""
            if i > 0 and not math.isnan(paired.low):
                text = compare.signed(quantity, paired.difference)
                text += f" {compare.interval_text(quantity, paired)}"
            cells.append((compare.spread_text(quantity, of_seed), text, paired.excludes_zero))
    return result


def differences(runs: Mapping[str, Run]) -> dict[str, list[str]]:
    """Settings, code and devices in which the arms differ -> each arm's, '-' where absent."""
    facts = [[_facts(run) for run in of_seed.values()] for of_seed in by_arm(runs).values()]
    keys = dict.fromkeys(key for of_arm in facts for of_run in of_arm for key in of_run)

    def text(key: str, of_arm: Sequence[Mapping]) -> str:
        values = (json.dumps(of_run[key]) if key in of_run else "-" for of_run in of_arm)
        return ", ".join(dict.fromkeys(values))

    table = {key: [text(key, of_arm) for of_arm in facts] for key in keys}
    return {key: texts for key, texts in table.items() if len(set(texts)) > 1}


def _facts(run: Run) -> dict[str, object]:
    start = run.starts[-1] if run.starts else {}
    return run.config | flatten({key: start[key] for key in CODE if key in start})


def verdict(row: Mapping) -> str:
    """Names the end of a response; "truncated" is one that is cut off and not right."""
    return "right" if row["correct"] else "truncated" if row["truncated"] else "wrong"


def problem_of(prompt: str) -> str:
    """A problem in one line, without DAPO's template around it."""
    before, after = PROMPT_TEMPLATE.split("{problem}")
    return " ".join(str(prompt).removeprefix(before).removesuffix(after).split())


def tokens_of(row: Mapping) -> list[tuple[str, float | None, int]]:
    """Lists (text, probability, class) of a response's tokens, without the middle of a long one.

    The class counts the bounds of UNLIKELY above the probability. A response without its tokens is
    one text of probability None.
    """
    if "token_texts" not in row:
        text, left_out = row["response"], len(row["response"]) - HEAD - TAIL
        if left_out > 0:
            text = f"{text[:HEAD]}\n[... {left_out:,} characters ...]\n{text[-TAIL:]}"
        return [(text, None, 0)]
    found = []
    for text, logp in zip(row["token_texts"], row["token_logp"], strict=True):
        p = 0.0 if logp is None else math.exp(logp)
        found.append((text or "·", p, sum(p < bound for bound in UNLIKELY)))
    left_out = len(found) - HEAD_TOKENS - TAIL_TOKENS
    if left_out > 0:
        found[HEAD_TOKENS:-TAIL_TOKENS] = [(f" [... {left_out:,} tokens ...] ", None, 0)]
    return found


def samples(runs: Mapping[str, Run]) -> dict[str, dict[int, list[dict]]]:
    """Chooses responses from rollouts/<step>.jsonl.gz: label -> step -> rows.

    They are of each arm's first run with such files, and SAMPLE_TOKENS in all: about as many of
    each step.
    """
    chosen = {}
    limit = SAMPLE_TOKENS // len(by_arm(runs)) // SAMPLE_STEPS
    for label, run in runs.items():
        if run.workdir and not any(runs[other].arm == run.arm != "" for other in chosen):
            files = {
                int(step): path
                for path in (run.workdir / "rollouts").glob("*.jsonl.gz")
                if (step := path.name.removesuffix(".jsonl.gz")).isdigit()
            }
            steps = thinned(sorted(files), limit=SAMPLE_STEPS)
            found = {step: _chosen_rows(files[step], limit_tokens=limit) for step in steps}
            if found := {step: rows for step, rows in found.items() if rows}:
                chosen[label] = found
    return chosen


def _chosen_rows(path: pathlib.Path, *, limit_tokens: int) -> list[dict]:
    """Rows of a step's file: the verdicts take turns, rows with their tokens first."""
    rows, spent = [], 0
    with contextlib.suppress(EOFError, OSError, ValueError, zlib.error):  # cut or broken: its start
        rows.extend(itertools.islice(read_rollouts(path), READ_RESPONSES))
    rows.sort(key=lambda row: "token_texts" not in row)
    by_verdict = [[row for row in rows if verdict(row) == name] for name in VERDICTS]
    chosen = []
    for row in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*by_verdict))):
        spent += min(row["tokens"], HEAD_TOKENS + TAIL_TOKENS)
        if len(chosen) == SAMPLES or (chosen and spent > limit_tokens):
            break
        chosen.append(row)
    return chosen


def events(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yields (kind, steps, text) of a run's alarms, faults, resumes and repeated steps."""
    alarms = [*dict.fromkeys(key for row in run.rows for key in row if key.startswith("alarm/"))]
    for key in alarms or ["alarms"]:
        if steps := _steps(run, key):
            yield "alarm", spans(steps), f"{key.removeprefix('alarm/')} ({len(steps)} steps)"
    for key, meaning in COUNTED.items():
        if steps := _steps(run, key):
            count = sum(row.get(key) or 0 for row in run.rows)
            yield "fault", spans(steps), f"{count:.0f} {meaning}"
    for number, (before, start) in enumerate(itertools.pairwise(run.starts), start=2):
        names = ("host", "commit", "versions", "devices")
        changed = [name for name in names if before.get(name) != start.get(name)]
        other = f", another {' and '.join(changed)}" if changed else ""
        yield "resume", "-", f"start {number} of {len(run.starts)}, {start.get('time', '-')}{other}"
    for path in sorted(run.workdir.glob("metrics.cut-*.jsonl")) if run.workdir else ():
        with contextlib.suppress(ValueError):  # a copy; nothing else depends on it
            steps = spans([row["step"] for row in read_rows(path)])
            yield "repeated", steps, f"the first attempt's rows are in {path.name}"


def _steps(run: Run, key: str) -> list[int]:
    return [row["step"] for row in run.rows if row.get(key)]


def unfinished(folder: pathlib.Path) -> list[dict]:
    """Lists the last attempt of each point of a sweep that did not end with status 0."""
    path, last = folder / "points.jsonl", {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a kill in a line
            point = json.loads(line)
            last[point["arm"], point["seed"]] = point
    return [point for point in last.values() if point.get("status") != 0]
