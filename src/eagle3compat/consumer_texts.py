"""The texts of the consumer's functions that shims rely on, as digests, by release.

speculators releases with an in-process generator are few, and 0.4.0 and 0.4.0.1 do not differ
here. A text that is not listed is not guessed at: the plan says drift.
"""

from __future__ import annotations

CONSTRUCT_030 = "645fe509445cbb69"  # VllmHiddenStatesGenerator.__init__
CONSTRUCT_040 = "631a3d8bcdbedaf0"
CONFIGURE_030 = "640404a3dbe3c6d1"  # VllmHiddenStatesGenerator._create_vllm_config
CONFIGURE_040 = "a47f23e1de77358e"
GENERATE_030 = "6800c30a41ded445"  # VllmHiddenStatesGenerator.generate
GENERATE_040 = "7bf379176a53b961"
FORWARD_030 = "d144710777c4a959"  # _patched_forward
FORWARD_040 = "b29ed80a92ab1fc4"
STORE_030 = "e335a16388efc3b4"  # HiddenStatesWorkerExtension._store_captured_states
STORE_040 = "35badde6ba94a6f1"
SET_UP_030 = "68b84bc2c4d45d9a"  # HiddenStatesWorkerExtension._setup_hidden_states_capture
SET_UP_040 = "302fbef5d7ea7a79"
COLLECT_030 = "5726d4cc4472332d"  # HiddenStatesWorkerExtension._get_captured_states
COLLECT_040 = "3b07d631e0d6ac59"
VERIFIER_PARTS_030 = "63d049c4b7080add"  # Eagle3DraftModel._setup_embeddings_and_lm_heads
VERIFIER_PARTS_040 = "2a4fa9d6fd7c3cc7"
DRAFT_030 = "158d0cba6b63d5ab"  # Eagle3DraftModel.__init__
DRAFT_040 = "c76609cbb66379fd"
DRAFT_FORWARD_030 = "58676ad735008afc"  # Eagle3DraftModel.forward
DRAFT_FORWARD_040 = "db3054aca5b57603"
LOAD_LAYERS_030 = "ca89ae0786dc2168"  # load_model_layers
LOAD_LAYERS_040 = "406a89acdf44c3fb"
SET_UP_MODEL_030 = "b8d131fab7de8b14"  # Trainer.setup_model
SET_UP_MODEL_040 = "efc95915b7346e98"
TRAIN_EPOCH = "045fda2044bbf37a"  # Trainer.train_epoch
CHECKPOINTS_030 = "4e274427b450e4c8"  # SingleGPUCheckpointer
CHECKPOINTS_040 = "6825a17cf521c607"
SET_UP_OPTIMIZER = "7524494f62d37348"  # Trainer.setup_optimizer
ATTEND = "c00e51a932e227ee"  # flex_attention_forward
MAKE_CONFIG = "f4c3eaf646b53da5"  # SpeculatorModelConfig.__init__
