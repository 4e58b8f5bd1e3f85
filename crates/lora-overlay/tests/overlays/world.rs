//! A small model with vocabulary tables, and adapters in memory that override rows of them.

use half::bf16;
use lora_config::{AdapterConfig, ModelSpec, ParseOptions, parse_peft_adapter_config};
use lora_kernels::testing::{Fill, Rng, TestBackend};
use lora_kernels::{DeviceBuffer, LaunchOptions, LoraKernels, Stream};
use lora_overlay::{
    EmbedOverlay, OverlayBuilder, OverlayError, OverlayRaw, ServedTable, ServedTables,
    build_overlay, stage_overlay_raw,
};
use lora_weights::device::DeviceMemory;
use lora_weights::{AdapterStore, MemoryTensor, PoolSpec, audit_adapter};
use std::sync::Arc;

pub(crate) const EMBED: &str = "base_model.model.model.embed_tokens";
pub(crate) const HEAD: &str = "base_model.model.lm_head";

/// A vocabulary table in host memory, BF16 values.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Table {
    pub(crate) rows: usize,
    pub(crate) hidden: usize,
    pub(crate) values: Vec<bf16>,
}

impl Table {
    pub(crate) fn random(rows: usize, hidden: usize, seed: u64) -> Self {
        Self {
            rows,
            hidden,
            values: Rng::new(seed).values(rows * hidden, Fill::Signed, 0.6),
        }
    }

    pub(crate) fn row(&self, row: usize) -> &[bf16] {
        &self.values[row * self.hidden..][..self.hidden]
    }

    /// With an element of each of these rows moved by `by`.
    pub(crate) fn moved(&self, rows: &[usize], by: f32) -> Self {
        let mut moved = self.clone();
        for row in rows {
            let value = &mut moved.values[row * self.hidden + row % self.hidden];
            *value = bf16::from_f32(value.to_f32() + by);
        }
        moved
    }

    /// With more rows.
    pub(crate) fn longer(&self, more: usize, seed: u64) -> Self {
        let mut longer = self.clone();
        longer.rows += more;
        longer
            .values
            .extend(Self::random(more, self.hidden, seed).values);
        longer
    }

    pub(crate) fn tensor(&self, name: String) -> MemoryTensor {
        MemoryTensor::from_bf16(name, [self.rows, self.hidden], &self.values)
    }
}

/// An adapter's config fields and tensors.
pub(crate) struct Parts {
    pub(crate) fields: String,
    pub(crate) tensors: Vec<MemoryTensor>,
}

impl Parts {
    pub(crate) fn new(fields: &str, tensors: impl IntoIterator<Item = MemoryTensor>) -> Self {
        Self {
            fields: fields.to_owned(),
            tensors: tensors.into_iter().collect(),
        }
    }

    /// Trained rows of the embedding.
    pub(crate) fn tokens(ids: &[u32], rows: &Table) -> Self {
        Self::new(
            &format!(r#""trainable_token_indices": {ids:?}"#),
            [rows.tensor(format!("{EMBED}.token_adapter.trainable_tokens_delta"))],
        )
    }

    pub(crate) fn store(self) -> (AdapterStore, AdapterConfig) {
        let comma = if self.fields.is_empty() { "" } else { ", " };
        let json = format!(
            r#"{{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": false{comma}{}}}"#,
            self.fields
        );
        let store = AdapterStore::from_tensors(json, self.tensors).expect("tensors");
        let config = parse_peft_adapter_config(store.config_json(), &ParseOptions::default());
        (store, config.expect("a config that parses"))
    }
}

/// A model's tables on a device.
pub(crate) struct World {
    pub(crate) backend: TestBackend,
    pub(crate) kernels: LoraKernels,
    pub(crate) model: ModelSpec,
    pub(crate) embed: Table,
    pub(crate) head: Table,
    tied: bool,
    embed_dev: Arc<DeviceBuffer>,
    head_dev: Arc<DeviceBuffer>,
    pub(crate) threshold: f32,
}

impl World {
    pub(crate) fn new(backend: &TestBackend, (vocab, hidden): (usize, usize), tied: bool) -> Self {
        let embed = Table::random(vocab, hidden, 1);
        let head = match tied {
            true => embed.clone(),
            false => Table::random(vocab, hidden, 2),
        };
        let upload = |table: &Table| {
            let buffer = DeviceBuffer::from_slice(backend.clone(), &table.values);
            Arc::new(buffer.expect("memory"))
        };
        Self {
            kernels: LoraKernels::new(backend.clone(), LaunchOptions::default()),
            model: model(vocab, hidden, tied),
            embed_dev: upload(&embed),
            head_dev: upload(&head),
            backend: backend.clone(),
            embed,
            head,
            tied,
            threshold: 0.1,
        }
    }

    pub(crate) fn memory(&self) -> Arc<dyn DeviceMemory> {
        Arc::clone(&self.backend) as Arc<_>
    }

    pub(crate) fn served(&self) -> ServedTables<'static> {
        let shared = |buffer: &Arc<DeviceBuffer>, table: &Table| {
            ServedTable::shared(Arc::clone(buffer), table.rows, table.hidden).expect("fits")
        };
        let embed = shared(&self.embed_dev, &self.embed);
        match self.tied {
            true => ServedTables::tied(embed),
            false => ServedTables::untied(embed, shared(&self.head_dev, &self.head)),
        }
    }

    pub(crate) fn hidden(&self) -> usize {
        self.embed.hidden
    }

    pub(crate) fn stage(&self, parts: Parts) -> Result<Option<OverlayRaw>, OverlayError> {
        let (store, config) = parts.store();
        let mut pool = PoolSpec::new(1, 16);
        pool.policy.overlays = true;
        let overlays = audit_adapter(&store, &config, &self.model, &pool).overlays;
        stage_overlay_raw(&self.memory(), &store, &config, &overlays, self.hidden())
    }

    pub(crate) fn build_against(
        &self,
        parts: Parts,
        served: &ServedTables<'_>,
    ) -> Result<Option<EmbedOverlay>, OverlayError> {
        let Some(raw) = self.stage(parts)? else {
            return Ok(None);
        };
        let builder = OverlayBuilder {
            backend: &self.backend,
            stream: Stream::OWN,
            threshold: self.threshold,
        };
        build_overlay(builder, raw, served)
    }

    pub(crate) fn build(&self, parts: Parts) -> Result<Option<EmbedOverlay>, OverlayError> {
        self.build_against(parts, &self.served())
    }

    pub(crate) fn overlay(&self, parts: Parts) -> EmbedOverlay {
        self.build(parts).expect("builds").expect("overrides")
    }
}

fn model(vocab: usize, hidden: usize, tied: bool) -> ModelSpec {
    let json = format!(
        r#"{{"model_type": "llama", "hidden_size": {hidden}, "num_hidden_layers": 1, "num_attention_heads": 1,
            "num_key_value_heads": 1, "head_dim": {hidden}, "intermediate_size": 8, "vocab_size": {vocab},
            "tie_word_embeddings": {tied}}}"#
    );
    ModelSpec::from_hf_config(&json).expect("a known family")
}

/// `rows` BF16 rows of a buffer.
pub(crate) fn table_of(buffer: &DeviceBuffer, rows: usize, hidden: usize) -> Table {
    Table {
        rows,
        hidden,
        values: buffer.download(0, rows * hidden).expect("reads back"),
    }
}

pub(crate) fn bits(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|v| v.to_bits()).collect()
}
