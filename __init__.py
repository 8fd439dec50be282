"""ARR-COC: Qwen3-VL with visual tokens chosen, before the vision tower, for this image and this question.

Importing the package registers its config and model with transformers' Auto classes, so that a local checkpoint loads
without remote code.
"""

from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from .configuration_arr_coc import ArrCocConfig
from .modeling_arr_coc import ArrCocForConditionalGeneration, ArrCocOutput

AutoConfig.register(ArrCocConfig.model_type, ArrCocConfig, exist_ok=True)
AutoModel.register(ArrCocConfig, ArrCocForConditionalGeneration, exist_ok=True)
AutoModelForImageTextToText.register(ArrCocConfig, ArrCocForConditionalGeneration, exist_ok=True)

__all__ = ["ArrCocConfig", "ArrCocForConditionalGeneration", "ArrCocOutput"]
