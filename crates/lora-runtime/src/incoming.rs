//! Adapters that come from elsewhere than a folder: from an engine's memory, or byte by byte.

use crate::{Adapter, LoraRuntime, RuntimeError};
use lora_weights::{
    AdapterManifest, AdapterSlot, AdapterStore, LandTarget, LandingInput, MemoryTensor, SlotTarget,
};
use std::error::Error;
use std::sync::Arc;

impl LoraRuntime {
    /// An adapter of tensors that the engine holds in memory, as a training loop has them after each step, with the text of its
    /// `adapter_config.json`. Nothing is copied and no file is written; loading it audits it as it audits a file, and swapping it
    /// into the slot of its own name gives the slot a new generation, and so a new prefix-cache key.
    ///
    /// ```
    /// use lora_runtime::config::{BackendKind, ModelSpec};
    /// use lora_runtime::weights::MemoryTensor;
    /// use lora_runtime::{LoraRuntime, RuntimeOptions};
    ///
    /// let model = ModelSpec::from_hf_config(
    ///     r#"{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    ///         "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 48}"#,
    /// )?;
    /// let mut options = RuntimeOptions::new(2, 8);
    /// options.pool.policy.allow_rotation = true; // a step replaces what was loaded at startup
    /// let lora = LoraRuntime::open(BackendKind::Host, model, options)?;
    ///
    /// let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": false, "target_modules": ["v_proj"]}"#;
    /// let path = "base_model.model.model.layers.0.self_attn.v_proj";
    /// let policy = |step: f32| {
    ///     lora.adapter_in_memory("policy", config, [
    ///         MemoryTensor::from_f32(format!("{path}.lora_A.weight"), [2, 32], &[0.25; 64]),
    ///         MemoryTensor::from_f32(format!("{path}.lora_B.weight"), [16, 2], &[step; 32]),
    ///     ])
    /// };
    /// lora.load(&[policy(0.5)?])?;
    /// let key = lora.adapter_id(0);
    /// let slot = lora.swap(0, &policy(0.75)?)?; // audited and packed while the former step still serves
    /// assert_eq!((slot.name(), slot.generation()), ("policy", 1));
    /// assert_ne!(lora.adapter_id(0), key);
    /// assert!(lora.swap(0, &policy(f32::NAN)?).is_err()); // refused: the slot goes on serving the step before
    /// assert_eq!(lora.adapter_id(0), slot.adapter_id());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`RuntimeError::Tensors`] for two tensors of one name, or bytes that do not fit shape and dtype;
    /// [`RuntimeError::AdapterConfig`] for a config that is refused.
    pub fn adapter_in_memory(
        &self,
        name: impl Into<String>,
        config_json: impl Into<String>,
        tensors: impl IntoIterator<Item = MemoryTensor>,
    ) -> Result<Adapter, RuntimeError> {
        let name = name.into();
        match AdapterStore::from_tensors(config_json, tensors) {
            Ok(store) => Adapter::from_store(name, store, self.parse_options()),
            Err(source) => Err(RuntimeError::Tensors {
                adapter: name,
                source,
            }),
        }
    }

    /// Brings an adapter into a slot whose bytes `land` brings: an engine's own transport (RDMA), or
    /// `RemoteAdapter::land` of `lora_weights::source`. `land` gets the copies to make and the slot's image in staging
    /// memory; see [`LoraWeights::stage_landed`](lora_weights::LoraWeights::stage_landed). BF16 adapters without rows of the vocabulary can come so; the others as an
    /// [`Adapter`] (`fetch_adapter`).
    ///
    /// # Errors
    /// [`RuntimeError::AdapterConfig`], and as [`LoraWeights::stage_landed`](lora_weights::LoraWeights::stage_landed) and [`pack_store_into_slot`](lora_weights::LoraWeights::pack_store_into_slot): until the upload
    /// begins no slot is touched.
    pub fn land<F>(
        &self,
        name: &str,
        manifest: &AdapterManifest,
        target: SlotTarget,
        land: F,
    ) -> Result<Arc<AdapterSlot>, RuntimeError>
    where
        F: FnOnce(&[LandTarget], &mut [u8]) -> Result<(), Box<dyn Error + Send + Sync>>,
    {
        let _span = tracing::info_span!("lora_land", adapter = name).entered();
        let config = manifest.config(self.parse_options()).map_err(|source| {
            RuntimeError::AdapterConfig {
                adapter: name.to_owned(),
                source,
            }
        })?;
        let mut input = LandingInput::new(name, &manifest.weights, &config);
        if let Some(tables) = self.expert_extension() {
            input = input.with_extension(tables);
        }
        let staged = self.weights().stage_landed(&input, land)?;
        Ok(self.weights().pack_store_into_slot(target, staged)?)
    }
}
