//! A dense feed-forward block.

use crate::checkpoint::Checkpoint;
use crate::math::{Linear, Rows, gated};
use crate::{Deltas, EngineError};
use half::bf16;
use lora_runtime::weights::LoraModule;

#[derive(Debug)]
pub(super) struct Mlp {
    layer: usize,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Mlp {
    pub(super) fn open(
        (hidden, width): (usize, usize),
        layer: usize,
        checkpoint: &mut Checkpoint,
    ) -> Result<Self, EngineError> {
        let name = |module: &str| format!("model.layers.{layer}.mlp.{module}_proj");
        Ok(Self {
            layer,
            gate: checkpoint.linear(&name("gate"), width, hidden)?,
            up: checkpoint.linear(&name("up"), width, hidden)?,
            down: checkpoint.linear(&name("down"), hidden, width)?,
        })
    }

    pub(super) fn forward(
        &self,
        x: &Rows<bf16>,
        deltas: &mut Deltas,
    ) -> Result<Rows<bf16>, EngineError> {
        let (mut gate, mut up) = (self.gate.forward(x), self.up.forward(x));
        let sites = [
            (LoraModule::GateProj, &mut gate),
            (LoraModule::UpProj, &mut up),
        ];
        deltas.add(self.layer, x, sites)?;
        let inner = Rows::rounded(gate.width(), gated(gate.values(), up.values()));
        let mut out = self.down.forward(&inner);
        deltas.add(self.layer, &inner, [(LoraModule::DownProj, &mut out)])?;
        Ok(out)
    }
}
