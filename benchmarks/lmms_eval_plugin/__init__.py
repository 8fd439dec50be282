"""ARR-COC and its rivals as a model of lmms-eval, so that its hundred tasks run with one command:

    LMMS_EVAL_PLUGINS=benchmarks.lmms_eval_plugin accelerate launch -m lmms_eval --model arr_coc \\
        --model_args pretrained=ORG/arr-coc-vis,num_visual_tokens=0.2 --tasks textvqa_val,chartqa --batch_size 8

`method=downscale` (or any name of `python -m benchmarks list`) runs that method at the same share in its place.
"""
