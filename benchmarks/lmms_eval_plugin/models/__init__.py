"""What lmms-eval looks up: `<plugin>.models.<name>.<class>`."""

AVAILABLE_MODELS = {"arr_coc": "ArrCoc"}
