"""How ARR-COC's models are made: `base` (the small Qwen3-VL), `arr_coc` (where to look). Run them by `train.py`."""
