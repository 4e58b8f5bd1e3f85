//! Deltas at one place of a layer, and what is to be installed there.

use crate::layers::{AttentionLayer, FfnLora, LayerLora, LinearAttentionLayer, LoraMoeWeights};
use crate::{LoraRuntime, RoutedBatch, RuntimeError};
use arrayvec::ArrayVec;
use lora_config::FfnKind;
use lora_kernels::{
    Applied, LaunchContext, LoraAttnWeights, LoraFfnWeights, LoraSite, MAX_SITES, MatMut, MatRef,
    PairSite, RouteSite, SiteKind, apply_lora_bgmv, apply_lora_delta,
};
use lora_weights::device::LoraPair;
use lora_weights::{AdapterSlot, ExpertLoraLayer, LoraModule};

/// One projection of a layer and where its delta lands.
#[derive(Debug)]
pub struct ModuleOut<'a> {
    /// The projection.
    pub module: LoraModule,
    /// Its output, `[rows, n_out]`, updated in place.
    pub out: MatMut<'a>,
}

impl LoraRuntime {
    /// Adds to every row of each output the delta of the row's own adapter. All `sites` are projections of `layer` that
    /// read the same x (q, k and v; gate and up) and go in one launch.
    ///
    /// A projection that the pool leaves out has nothing installed: it is passed over. Outputs of row-parallel projections
    /// must have been all-reduced.
    ///
    /// # Errors
    /// [`RuntimeError::NoSuchSite`] for a projection that the layer does not have, [`RuntimeError::TooManySites`], and
    /// as [`apply_lora_bgmv`].
    pub fn apply<'a>(
        &self,
        ctx: &mut LaunchContext<'_>,
        batch: &RoutedBatch,
        layer: usize,
        x: MatRef<'_>,
        sites: impl IntoIterator<Item = ModuleOut<'a>>,
    ) -> Result<Applied, RuntimeError> {
        let mut routed: ArrayVec<RouteSite<'a>, MAX_SITES> = ArrayVec::new();
        let mut kind = SiteKind::Attention;
        for (at, ModuleOut { module, out }) in sites.into_iter().enumerate() {
            let Some(route) = self.checked_route(layer, module)? else {
                continue;
            };
            kind = site_kind(module);
            let too_many = RuntimeError::TooManySites {
                sites: at + 1,
                most: MAX_SITES,
            };
            routed
                .try_push(RouteSite { route, out })
                .map_err(|_| too_many)?;
        }
        Ok(apply_lora_bgmv(ctx, kind, x, batch.groups(), &mut routed)?)
    }

    /// Adds one pair's delta to every row of `out`: for rows that are known to share an adapter, such as those of one expert
    /// that one adapter's requests were routed to. Returns without a launch where there is no pair.
    ///
    /// # Errors
    /// As [`apply_lora_delta`].
    pub fn apply_pair(
        &self,
        ctx: &mut LaunchContext<'_>,
        kind: SiteKind,
        pair: Option<LoraPair>,
        x: MatRef<'_>,
        out: MatMut<'_>,
    ) -> Result<Applied, RuntimeError> {
        let Some(pair) = pair else {
            return Ok(Applied::Empty);
        };
        Ok(apply_lora_delta(
            ctx,
            kind,
            x,
            &mut [PairSite { pair, out }],
        )?)
    }

    /// What to install on `layer`: pairs of the active adapter and routes, by copy.
    ///
    /// # Errors
    /// [`RuntimeError::NoSuchSite`] for a layer past the model.
    pub fn layer(&self, layer: usize) -> Result<LayerLora, RuntimeError> {
        let Some(spec) = self.model().layers.get(layer) else {
            return Err(self.no_such_site(layer, LoraModule::QProj));
        };
        let active = self
            .weights()
            .active_slot()
            .and_then(|slot| self.weights().adapter(slot));
        let site = |module: LoraModule| self.site(active.as_deref(), layer, module);
        let mut ffn = FfnLora::empty(layer, spec.ffn);
        match spec.ffn {
            FfnKind::Dense { .. } => ffn.set_ffn_lora_weights(LoraFfnWeights {
                layer,
                gate: site(LoraModule::GateProj),
                up: site(LoraModule::UpProj),
                down: site(LoraModule::DownProj),
            })?,
            FfnKind::Moe => ffn.set_moe_lora_weights(self.moe_weights(active.as_deref(), layer))?,
            FfnKind::Absent => {}
        }
        if spec.attention.is_attention() {
            let attention = LoraAttnWeights {
                layer,
                q: site(LoraModule::QProj),
                k: site(LoraModule::KProj),
                v: site(LoraModule::VProj),
                o: site(LoraModule::OProj),
            };
            return Ok(LayerLora::Attention(AttentionLayer {
                attention,
                qkv: site(LoraModule::QkvProj),
                ffn,
            }));
        }
        let inputs = LoraModule::EXTENDED
            .into_iter()
            .filter(|module| module.is_gdn_input());
        let inputs = inputs
            .map(|module| (module, site(module)))
            .filter(|(_, site)| !site.is_empty());
        Ok(LayerLora::LinearAttention(LinearAttentionLayer {
            out_proj: site(LoraModule::OutProj),
            inputs: inputs.collect(),
            ffn,
        }))
    }

    fn moe_weights(&self, active: Option<&AdapterSlot>, layer: usize) -> LoraMoeWeights {
        let site = |module: LoraModule| self.site(active, layer, module);
        let experts = active
            .and_then(|adapter| adapter.experts().get(layer))
            .cloned();
        let router = experts.as_ref().and_then(ExpertLoraLayer::router);
        LoraMoeWeights {
            layer,
            router: LoraSite {
                pair: router,
                route: self.weights().router_route(layer),
            },
            shared: LoraFfnWeights {
                layer,
                gate: site(LoraModule::SharedGateProj),
                up: site(LoraModule::SharedUpProj),
                down: site(LoraModule::SharedDownProj),
            },
            shared_gate: site(LoraModule::SharedExpertGate),
            experts: experts.unwrap_or_default(),
            fold: self.expert_fold(layer).ok(),
        }
    }

    fn site(&self, active: Option<&AdapterSlot>, layer: usize, module: LoraModule) -> LoraSite {
        LoraSite {
            pair: active.and_then(|adapter| adapter.pair(layer, module)),
            route: self.weights().route(layer, module),
        }
    }

    /// The route of a module that the layer must have; `None` where the pool leaves it out.
    fn checked_route(
        &self,
        layer: usize,
        module: LoraModule,
    ) -> Result<Option<lora_weights::device::LoraRoute>, RuntimeError> {
        if module.applies_to_layer(self.model(), layer) {
            Ok(self.weights().route(layer, module))
        } else {
            Err(self.no_such_site(layer, module))
        }
    }

    fn no_such_site(&self, layer: usize, module: LoraModule) -> RuntimeError {
        RuntimeError::NoSuchSite {
            layer,
            module,
            layers: self.model().layers.len(),
        }
    }
}

/// What levers switch a module's deltas by.
fn site_kind(module: LoraModule) -> SiteKind {
    match module {
        LoraModule::QProj
        | LoraModule::KProj
        | LoraModule::VProj
        | LoraModule::OProj
        | LoraModule::QkvProj => SiteKind::Attention,
        LoraModule::OutProj => SiteKind::GdnOut,
        module if module.is_gdn_input() => SiteKind::GdnIn,
        _ => SiteKind::DenseFfn,
    }
}
