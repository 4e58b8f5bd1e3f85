//! Adapters as an engine hands them over.

use crate::RuntimeError;
use lora_config::{AdapterConfig, ParseOptions, parse_peft_adapter_config};
use lora_weights::{AdapterStore, LoraAdapterInput};
use std::path::Path;

/// An adapter with a name, its tensors at hand and its config parsed. Nothing is audited yet and no device is touched.
#[derive(Debug)]
pub struct Adapter {
    name: String,
    store: AdapterStore,
    config: AdapterConfig,
    pinned: bool,
}

impl Adapter {
    /// Opens a PEFT adapter folder. Tensors are mapped, not read.
    ///
    /// # Errors
    /// [`RuntimeError::Store`] for files that are missing or malformed, [`RuntimeError::AdapterConfig`] for a config that
    /// is refused.
    pub fn open(
        name: impl Into<String>,
        dir: &Path,
        options: &ParseOptions,
    ) -> Result<Self, RuntimeError> {
        let name = name.into();
        match AdapterStore::open(dir) {
            Ok(store) => Self::from_store(name, store, options),
            Err(source) => Err(RuntimeError::Store {
                adapter: name,
                source: Box::new(source),
            }),
        }
    }

    /// An adapter whose tensors are open or in memory already, as a training loop has them.
    ///
    /// # Errors
    /// [`RuntimeError::AdapterConfig`] for a config that is refused.
    pub fn from_store(
        name: impl Into<String>,
        store: AdapterStore,
        options: &ParseOptions,
    ) -> Result<Self, RuntimeError> {
        let name = name.into();
        match parse_peft_adapter_config(store.config_json(), options) {
            Ok(config) => Ok(Self {
                name,
                store,
                config,
                pinned: true,
            }),
            Err(source) => Err(RuntimeError::AdapterConfig {
                adapter: name,
                source,
            }),
        }
    }

    /// The same, but promotion may later take the slot that it fills at startup.
    #[must_use]
    pub fn unpinned(self) -> Self {
        Self {
            pinned: false,
            ..self
        }
    }

    /// The name it is to be loaded under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its parsed config.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// Its tensors.
    pub fn store(&self) -> &AdapterStore {
        &self.store
    }

    /// As `lora-weights` takes it.
    pub(crate) fn input(&self) -> LoraAdapterInput<'_> {
        let input = LoraAdapterInput::new(&self.name, &self.store, &self.config);
        if self.pinned { input } else { input.unpinned() }
    }
}
