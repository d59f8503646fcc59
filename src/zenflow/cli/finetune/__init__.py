"""``zenflow finetune``: full fine-tuning of a causal language model through TRL's ``SFTTrainer``.

``command`` is what ``main`` calls, ``run`` the course of a run; every other module is one noun.
Modules import transformers, TRL and datasets inside functions, so that help and errors in the
command line come at once.
"""
