"""Configuration of the tiny Kimi-K2.5: a DeepSeek-V3 language model behind a vision tower."""

from transformers import DeepseekV3Config, PretrainedConfig


class KimiK25VisionConfig(PretrainedConfig):
    """The vision tower and the projector; every field comes from ``config.json``."""

    model_type = "kimi_k25_vision"


class KimiK25Config(PretrainedConfig):
    """The whole model: ``text_config``, ``vision_config`` and the tokens that stand for media."""

    model_type = "kimi_k25"

    def __init__(
        self,
        text_config=None,
        vision_config=None,
        ignore_index=-100,
        media_placeholder_token_id=0,
        use_unified_vision_chunk=True,
        video_placeholder="<|kimi_k25_video_placeholder|>",
        **kwargs,
    ):
        self.text_config = _configuration(DeepseekV3Config, text_config)
        self.vision_config = _configuration(KimiK25VisionConfig, vision_config)
        self.ignore_index = ignore_index
        self.media_placeholder_token_id = media_placeholder_token_id
        self.use_unified_vision_chunk = use_unified_vision_chunk
        self.video_placeholder = video_placeholder
        super().__init__(**kwargs)


def _configuration(kind, given):
    return given if isinstance(given, PretrainedConfig) else kind(**(given or {}))
