//! What an engine installs on a layer: pairs and routes by copy, and the launches they go in.

use crate::{
    Applied, KernelError, LaunchContext, MatMut, MatRef, PairSite, RouteSite, RowGroups, SiteKind,
    apply_lora_bgmv, apply_lora_delta,
};
use arrayvec::ArrayVec;
use lora_weights::device::{LoraPair, LoraRoute};

/// What is installed at one projection: the active adapter's pair, the tables that route rows, both or neither.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LoraSite {
    /// The active adapter, if it adapts this projection.
    pub pair: Option<LoraPair>,
    /// The tables, if any slot can.
    pub route: Option<LoraRoute>,
}

impl LoraSite {
    /// Whether nothing is installed: its launches return early.
    pub fn is_empty(&self) -> bool {
        self.pair.is_none() && self.route.is_none()
    }

    /// The delta of this projection alone; x is `[rows, k_in]`. Nothing installed for `rows` gives [`Applied::Empty`].
    ///
    /// # Errors
    /// As [`apply_lora_delta`] and [`apply_lora_bgmv`].
    pub fn apply(
        &self,
        ctx: &mut LaunchContext<'_>,
        kind: SiteKind,
        rows: LoraRows<'_>,
        x: MatRef<'_>,
        out: MatMut<'_>,
    ) -> Result<Applied, KernelError> {
        apply_installed(ctx, kind, (rows, x), [(*self, out)])
    }
}

/// Which adapter each row of a batch takes.
#[derive(Debug, Clone, Copy)]
pub enum LoraRows<'a> {
    /// Every row the active adapter: the pair.
    Active,
    /// Each row its own: the route, by these groups.
    Routed(&'a RowGroups),
}

/// Outputs of the q, k and v projections, `[rows, width]` each; three parts of an interleaved row through
/// [`MatMut::split_cols`].
#[derive(Debug)]
pub struct QkvOut<'a> {
    /// Output of q, raw: where the model gates attention, `[Q|gate]` before it is split.
    pub q: MatMut<'a>,
    /// Output of k.
    pub k: MatMut<'a>,
    /// Output of v.
    pub v: MatMut<'a>,
}

/// Outputs of the gate and up projections, `[rows, width]` each.
#[derive(Debug)]
pub struct GateUpOut<'a> {
    /// Output of gate.
    pub gate: MatMut<'a>,
    /// Output of up.
    pub up: MatMut<'a>,
}

/// The four projections of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LoraAttnWeights {
    /// The layer, by its index in the whole model.
    pub layer: usize,
    /// q projection.
    pub q: LoraSite,
    /// k projection.
    pub k: LoraSite,
    /// v projection.
    pub v: LoraSite,
    /// Output projection.
    pub o: LoraSite,
}

impl LoraAttnWeights {
    /// Whether nothing is installed.
    pub fn is_empty(&self) -> bool {
        [self.q, self.k, self.v, self.o]
            .iter()
            .all(LoraSite::is_empty)
    }

    /// Deltas of q, k and v in one launch; x is `[rows, hidden]`.
    ///
    /// # Errors
    /// As [`apply_lora_delta`] and [`apply_lora_bgmv`].
    pub fn apply_qkv(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: LoraRows<'_>,
        x: MatRef<'_>,
        out: QkvOut<'_>,
    ) -> Result<Applied, KernelError> {
        let sites = [(self.q, out.q), (self.k, out.k), (self.v, out.v)];
        apply_installed(ctx, SiteKind::Attention, (rows, x), sites)
    }

    /// Delta of the output projection; x is `[rows, heads * head width]`. Under tensor parallelism out must have been reduced over all
    /// ranks before, or the delta is added once a rank.
    ///
    /// # Errors
    /// As [`apply_lora_delta`] and [`apply_lora_bgmv`].
    pub fn apply_o(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: LoraRows<'_>,
        x: MatRef<'_>,
        out: MatMut<'_>,
    ) -> Result<Applied, KernelError> {
        apply_installed(ctx, SiteKind::Attention, (rows, x), [(self.o, out)])
    }
}

/// The three projections of a dense FFN.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LoraFfnWeights {
    /// The layer, by its index in the whole model.
    pub layer: usize,
    /// gate projection.
    pub gate: LoraSite,
    /// up projection.
    pub up: LoraSite,
    /// down projection.
    pub down: LoraSite,
}

impl LoraFfnWeights {
    /// Whether nothing is installed.
    pub fn is_empty(&self) -> bool {
        [self.gate, self.up, self.down]
            .iter()
            .all(LoraSite::is_empty)
    }

    /// Deltas of gate and up in one launch; x is `[rows, hidden]`.
    ///
    /// # Errors
    /// As [`apply_lora_delta`] and [`apply_lora_bgmv`].
    pub fn apply_gate_up(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: LoraRows<'_>,
        x: MatRef<'_>,
        out: GateUpOut<'_>,
    ) -> Result<Applied, KernelError> {
        let sites = [(self.gate, out.gate), (self.up, out.up)];
        apply_installed(ctx, SiteKind::DenseFfn, (rows, x), sites)
    }

    /// Delta of the down projection; x is `[rows, intermediate]`. Under tensor parallelism out must have been reduced over all ranks
    /// before, or the delta is added once a rank.
    ///
    /// # Errors
    /// As [`apply_lora_delta`] and [`apply_lora_bgmv`].
    pub fn apply_down(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: LoraRows<'_>,
        x: MatRef<'_>,
        out: MatMut<'_>,
    ) -> Result<Applied, KernelError> {
        apply_installed(ctx, SiteKind::DenseFfn, (rows, x), [(self.down, out)])
    }
}

/// Launches the sites that have something installed for `rows`; none gives [`Applied::Empty`].
fn apply_installed<const N: usize>(
    ctx: &mut LaunchContext<'_>,
    kind: SiteKind,
    (rows, x): (LoraRows<'_>, MatRef<'_>),
    sites: [(LoraSite, MatMut<'_>); N],
) -> Result<Applied, KernelError> {
    match rows {
        LoraRows::Active => {
            let pairs = sites.into_iter().filter_map(|(site, out)| {
                Some(PairSite {
                    pair: site.pair?,
                    out,
                })
            });
            apply_lora_delta(ctx, kind, x, &mut pairs.collect::<ArrayVec<_, N>>())
        }
        LoraRows::Routed(groups) => {
            let routes = sites.into_iter().filter_map(|(site, out)| {
                Some(RouteSite {
                    route: site.route?,
                    out,
                })
            });
            apply_lora_bgmv(
                ctx,
                kind,
                x,
                groups,
                &mut routes.collect::<ArrayVec<_, N>>(),
            )
        }
    }
}
