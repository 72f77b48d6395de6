"""Names of files and numbers that several modules share."""

IGNORE_INDEX = -100  # a label that carries no loss
GENERATION_METRICS = ("exact_match", "rouge_l")  # of predict_with_generate

# Hugging Face's file names
HF_CONFIG_NAME = "config.json"
HF_GENERATION_CONFIG_NAME = "generation_config.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"

# those of a tokenizer: fast ones, WordPiece, BPE, sentencepiece, and what transformers adds
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "tokenizer.model.v3", "spiece.model", "sentencepiece.bpe.model"),
    *("tekken.json", "tiktoken.model"),
)

# PEFT's
ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"

# our own
MCA_CONFIG_NAME = "mca_config.json"
RUN_CONFIG_NAME = "config.yaml"
TRAINER_STATE_NAME = "trainer_state.json"
TRAINER_LOG_NAME = "trainer_log.jsonl"
EVAL_RESULTS_NAME = "eval_results.json"
RUN_SUMMARY_NAME = "run_summary.json"
GENERATIONS_NAME = "generations.jsonl"
PREDICTIONS_NAME = "predictions.jsonl"
LOSS_PLOT_NAME = "training_loss.png"
PAGE_NAME = "report.html"
CHECKPOINT_PREFIX = "checkpoint"
