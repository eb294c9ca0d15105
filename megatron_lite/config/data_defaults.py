"""What the data flags mean when they are left out, and what no flag says."""

SPLIT = "969,30,1"  # shares of training, validation and test
SENTENCE_PIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")  # one and the same here
OF_A_MODEL = ("HuggingFaceTokenizer", *SENTENCE_PIECE, "TikTokenizer")  # they read --tokenizer-model
TOKENIZERS = ("GPT2BPETokenizer", *OF_A_MODEL, "ByteTokenizer", "NullTokenizer")  # the first one when left out
TOKENIZER = TOKENIZERS[0]
TIKTOKEN_PATTERN = "v2"
TIKTOKEN_SPECIAL = 1000
BATCHES_AHEAD = 4  # of the loader, per worker
