"""``offload predict``, which writes a checkpoint's outputs for a data set."""

from __future__ import annotations

from pathlib import Path

import click

from offload.cli.output import stdout_for_json
from offload.cli.script import build_predictor, check_script

_SCRIPT = "a Python file that defines predictor() -> offload.Predictor"


@click.command()
@click.argument("checkpoint")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The Parquet file to write.")
@click.option(
    "--batch-size", default=64, show_default=True, metavar="N", type=int, help="Samples of a batch of the model."
)
@click.option("--argmax", is_flag=True, help="Add the column prediction: the number of each sample's largest output.")
@click.option("--seed", default=0, show_default=True, metavar="N", type=int, help="Seed of random transforms.")
@click.option("--overwrite", is_flag=True, help="Replace an output, and an interrupted prediction.")
@click.option(
    "--address",
    metavar="HOST:PORT",
    help='A Ray cluster ("auto": RAY_ADDRESS, or else this host\'s). Default: RAY_ADDRESS, or this machine without Ray.',
)
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON on stdout, everything else on stderr.")
@click.option("--quiet", is_flag=True, help="No progress line; only what your code prints.")
def predict(
    checkpoint: str,
    script: Path,
    args: tuple[str, ...],
    output: Path,
    batch_size: int,
    argmax: bool,
    seed: int,
    overwrite: bool,
    address: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the outputs of CHECKPOINT for every sample of SCRIPT's data to a Parquet file.

    \b
        offload predict runs/train train.py -o out.parquet
        offload predict weights.pt train.py -o out.parquet --argmax -- --data new/

    CHECKPOINT is a run directory (its newest checkpoint), a folder checkpoint_TIME in it, or a file with a state_dict. SCRIPT is a Python
    file that defines predictor(): the model as training builds it, and the data with the preprocessing of validation. It can be the
    script of the training. Arguments after -- go to the script (its sys.argv):

    \b
        def predictor():
            return offload.Predictor(build_model, build().datasets["val"])

    All CPUs preprocess, and the model runs on each accelerator, or on the CPUs if there is none. The file has one row for each sample,
    in the order of the data: sample_id, key (its path, or its place in a file), what the Predictor keeps, and the outputs. It appears when
    it is complete. Until then, OUTPUT.parts holds what is done: after Ctrl-C, a crash or kill -9, the same command goes on there.

    Exit codes: 0 success, 130 interrupted, 2 an error before the first sample, 1 a later failure.
    """
    from offload.inference.parts import check_output, output_path
    from offload.train.driver.platform.choice import check_address

    with stdout_for_json(as_json) as emit:
        # Check these before the script runs, which may take long.
        check_script(script, _SCRIPT)
        check_output(output_path(output), overwrite=overwrite)
        address = check_address(address)
        predictor = build_predictor(script, args, address)
        from offload.inference.predict import predict as run

        result = run(
            predictor,
            checkpoint,
            output,
            batch_size=batch_size,
            argmax=argmax,
            seed=seed,
            overwrite=overwrite,
            address=address,
            quiet=quiet,
        )
        emit(result.document, result.summary())
