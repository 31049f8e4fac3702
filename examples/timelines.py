"""Draw which worker runs which task and when, under Dask and under ferroflow, in virtual time.

python timelines.py  # writes timelines.svg
"""

from pathlib import Path

import dask

from ferroflow_dask import simulate

LENGTHS = {"load": 0.05, "fit": 0.3, "score": 0.1}
COLOURS = {"load": "#e0a030", "fit": "#4c78d0", "score": "#3a9a6a"}
WIDTH, ROW, LEFT = 640, 18, 90


def program():
    data = dask.delayed(lambda: 1.0)(dask_key_name="load-0")
    models = [dask.delayed(abs)(data, dask_key_name=f"fit-{i}") for i in range(8)]
    return [dask.delayed(abs)(model, dask_key_name=f"score-{i}") for i, model in enumerate(models)]


def bars(outcome, top, scale):
    yield f'<text x="0" y="{top - 8}" font-weight="bold">{outcome.policy}: {outcome.makespan_s:.2f} s</text>'
    for worker in range(outcome.workers):
        yield f'<text x="0" y="{top + ROW * worker + 13}">worker {worker}</text>'
    for task in outcome.timeline:
        prefix = str(task.key).partition("-")[0]
        x, y = LEFT + scale * task.start_s, top + ROW * task.worker
        width = max(1.0, scale * (task.stop_s - task.start_s) - 1)
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 3}" '
            f'fill="{COLOURS.get(prefix, "#888888")}"><title>{task.key}</title></rect>'
        )


def main():
    options = {"workers": 8, "durations_s": LENGTHS, "nbytes": 1e6}
    found = simulate(program(), "this-machine", ["dask", "ferroflow"], **options)
    scale = (WIDTH - LEFT) / max(outcome.makespan_s for outcome in found)
    height, lines = 30, []
    for outcome in found:
        lines += bars(outcome, height, scale)
        height += ROW * outcome.workers + 40
        print(f"{outcome.policy}: {outcome.makespan_s:.2f} s, {outcome.steals} steals")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height - 20}"'
    style = 'font-family="sans-serif" font-size="12" fill="#808080">'
    Path("timelines.svg").write_text("\n".join([f"{head} {style}", *lines, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
