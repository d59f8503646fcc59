"""The flags of ``zenflow finetune``, in groups; each says its unit, its default and why.

Every default is None here, so that a resumed run can tell what was given; ``settings`` has them.
"""

import argparse

from zenflow.cli.converters import integer, number
from zenflow.cli.finetune.settings import (
    BUILT_IN,
    BUILT_IN_STEPS,
    DEFAULTS,
    GIVEN_MODEL,
    OPTIMIZERS,
)
from zenflow.config import ZenFlowConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``zenflow finetune`` to a parser."""
    _add_inputs(parser.add_argument_group("model and data"))
    _add_output(parser.add_argument_group("output, checkpoints, resuming"))
    _add_training(parser.add_argument_group("training"))
    _add_optimizer(parser.add_argument_group("optimizer"))
    _add_zenflow(
        parser.add_argument_group(
            "ZenFlow", "only with --optimizer zenflow; the names of the paper and of DeepSpeed"
        )
    )


def _add_inputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        metavar="DIR|HUB_ID",
        help="a Hugging Face model directory or hub id. Default: a small built-in model "
        "(Qwen2 architecture) whose weights start random, because none can be assumed offline",
    )
    group.add_argument(
        "--data",
        metavar="FILE|HUB_ID",
        help='a .txt, .jsonl or .parquet file or a hub id. Rows have "text", or "prompt" and '
        '"completion" (strings or messages; only the completion is learned), or "messages" '
        "(needs a chat template). Default: the documentation topics that ship with Python",
    )
    group.add_argument(
        "--eval-data",
        metavar="FILE|HUB_ID",
        help="held-out data of the same form. Default: held out of --data",
    )
    group.add_argument(
        "--eval-fraction",
        type=number(0, 1, ends=False),
        metavar="SHARE",
        help="share of --data's rows that is held out, drawn by --seed: at least 1 row, at most "
        f"500. Default {DEFAULTS['eval_fraction']}",
    )
    group.add_argument(
        "--max-length",
        type=integer(2),
        metavar="TOKENS",
        help="tokens in a sequence. Text is cut into blocks of it; other forms are truncated. "
        f"{_defaults('max_length')}",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output",
        metavar="DIR",
        help="directory for the model, checkpoints and summary.json; created. "
        "Default: zenflow-output, or the next free of zenflow-output-2, -3, ...",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an earlier run in --output; any other non-empty directory is still refused",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --output from its newest whole checkpoint. Its options are "
        "remembered; --max-steps, --epochs and a few more may be given anew. Default --output: "
        "the last zenflow-output",
    )
    group.add_argument(
        "--save-every",
        type=integer(0),
        metavar="STEPS",
        help="steps between checkpoints, of which the newest 2 are kept; 0 saves none (Ctrl-C "
        f"still saves one). Default {DEFAULTS['save_every']}, and one at the end",
    )
    group.add_argument(
        "--log-every",
        type=integer(1),
        metavar="STEPS",
        help=f"steps between progress figures. {_defaults('log_every')}",
    )
    group.add_argument(
        "--eval-every",
        type=integer(0),
        metavar="STEPS",
        help="steps between held-out evaluations while training; 0: only before and after. "
        f"Default {DEFAULTS['eval_every']}",
    )
    group.add_argument(
        "--prompt",
        metavar="TEXT",
        help="what the sample generation before and after continues. Default: from held-out data",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--max-steps",
        type=integer(1),
        metavar="STEPS",
        help=f"optimizer steps. Default for the built-in model: {BUILT_IN_STEPS}",
    )
    length.add_argument(
        "--epochs",
        type=number(0, float("inf"), ends=False),
        metavar="N",
        help="passes over the data. Default for a given model: 1",
    )
    group.add_argument(
        "--batch-size",
        type=integer(1),
        metavar="N",
        help=f"sequences in a forward pass. {_defaults('batch_size')}",
    )
    group.add_argument(
        "--gradient-accumulation",
        type=integer(1),
        metavar="N",
        help="forward passes gathered in one optimizer step. "
        f"Default {DEFAULTS['gradient_accumulation']}",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of the weights; ZenFlow keeps float32 masters beside 16-bit ones. float16 "
        "means float32 weights computed in float16 with loss scaling, and needs an accelerator. "
        "Default auto: bfloat16 on an accelerator that has it, else float32",
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        help="where the model is trained. Default auto: cuda if there is one",
    )
    group.add_argument(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        help="compute activations twice instead of keeping them: less memory, about 20%% slower. "
        "Default: on with an accelerator, off on the CPU",
    )
    group.add_argument(
        "--seed",
        type=integer(0),
        metavar="N",
        help=f"of held-out choice, order and random weights. Default {DEFAULTS['seed']}",
    )


def _add_optimizer(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="zenflow: AdamW offloaded without stalls; zero-offload: the same, each step waiting "
        "for the host (exact AdamW); adamw: torch.optim.AdamW on the device, no offload, its state "
        "in the weights' dtype. "
        f"Default {DEFAULTS['optimizer']}",
    )
    group.add_argument(
        "--lr",
        type=number(0, float("inf"), ends=False),
        metavar="RATE",
        help=f"peak learning rate. {_defaults('lr')}, which starts random",
    )
    group.add_argument(
        "--lr-schedule",
        choices=("linear", "cosine", "constant"),
        help=f"of the rate after the warm-up. Default {DEFAULTS['lr_schedule']}: down to 0",
    )
    group.add_argument(
        "--warmup-steps",
        type=integer(0),
        metavar="STEPS",
        help=f"steps in which the rate rises from 0. {_defaults('warmup_steps')}",
    )
    group.add_argument(
        "--weight-decay",
        type=number(0, float("inf")),
        metavar="RATE",
        help=f"decoupled decay; norms and biases have none. Default {DEFAULTS['weight_decay']}",
    )
    group.add_argument(
        "--max-grad-norm",
        type=number(0, float("inf")),
        metavar="NORM",
        help="all gradients together are clipped to this L2 norm; 0 clips nothing. "
        f"Default {DEFAULTS['max_grad_norm']:g}",
    )


def _add_zenflow(group: argparse._ArgumentGroup) -> None:
    default = ZenFlowConfig()
    group.add_argument(
        "--topk-ratio",
        type=number(0, 1),
        metavar="SHARE",
        help="share of each weight's channels updated on the device in every step, 0 to 1: the "
        "few that carry most of the gradient, at 12 bytes of device memory a weight. "
        f"Default {default.topk_ratio}",
    )
    group.add_argument(
        "--update-interval",
        type=integer(1, auto=True),
        metavar="STEPS|auto",
        help="steps of gradients gathered before the host applies them. "
        f"Default {default.update_interval}: the smallest that does not stall on this machine, "
        "because staleness costs quality",
    )
    group.add_argument(
        "--max-update-interval",
        type=integer(1),
        metavar="STEPS",
        help=f"bound of --update-interval auto, and so of staleness. "
        f"Default {default.max_update_interval}, the paper's steady state",
    )
    group.add_argument(
        "--select-interval",
        type=integer(1, auto=True),
        metavar="STEPS|auto",
        help="steps between two choices of the channels to keep on the device. "
        f"Default {default.select_interval}: rarer while the choice is stable",
    )
    group.add_argument(
        "--full-warm-up-rounds",
        type=integer(0),
        metavar="STEPS",
        help="first steps that wait for the host, as staleness costs most there. "
        f"Default {default.full_warm_up_rounds}: a pretrained model does not need it",
    )
    group.add_argument(
        "--overlap-step",
        action=argparse.BooleanOptionalAction,
        help="let the host work beside the next steps. Default on: it is what removes the stall",
    )
    group.add_argument(
        "--update-rule",
        choices=("replay", "accumulate"),
        help="replay: each gathered gradient is its own AdamW step; accumulate: one step with "
        f"their mean, the paper's rule, which learns slower. Default {default.update_rule}",
    )
    group.add_argument(
        "--lookahead",
        action=argparse.BooleanOptionalAction,
        help="publish weights extrapolated by their delay; masters stay exact. Default on",
    )
    group.add_argument(
        "--preview",
        action=argparse.BooleanOptionalAction,
        help="let weights that wait for the host show each gradient at once, roughly. Default on: it "
        "removes most of what staleness costs",
    )
    group.add_argument(
        "--host-threads",
        type=integer(1, auto=True),
        metavar="N|auto",
        help=f"threads that apply updates on the host. Default {default.host_threads}: as many as "
        "cores are allowed, up to 8; they give way to the model",
    )
    group.add_argument(
        "--selection-log",
        action="store_true",
        default=None,
        help="record in DIR/selection.jsonl what `zenflow inspect DIR` shows. Default off",
    )


def _defaults(key: str) -> str:
    return f"Default {GIVEN_MODEL[key]:g}, or {BUILT_IN[key]:g} for the built-in model"
