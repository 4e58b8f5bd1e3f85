//! The packed pairs of one adapter, by layer.

use crate::device::LoraPair;
use crate::{ExpertProj, LoraModule};

/// The dense pairs of one layer: attention, dense FFN, GDN, extended modules.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LoraLayerWeights {
    /// Ascending by module.
    pairs: Vec<(LoraModule, LoraPair)>,
}

impl LoraLayerWeights {
    /// A layer that the adapter leaves alone.
    pub fn empty() -> Self {
        Self::default()
    }

    /// The pair of `module`; `None` where the adapter does not adapt it.
    pub fn module_pair(&self, module: LoraModule) -> Option<LoraPair> {
        let at = self.pairs.binary_search_by_key(&module, |(m, _)| *m).ok()?;
        Some(self.pairs[at].1)
    }

    /// Every adapted module with its pair, in layout order.
    pub fn pairs(&self) -> impl Iterator<Item = (LoraModule, LoraPair)> {
        self.pairs.iter().copied()
    }

    /// True where the adapter adapts no dense module of this layer.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Puts `pair` at `module`, in place of one that is there.
    pub(crate) fn set(&mut self, module: LoraModule, pair: LoraPair) {
        match self.pairs.binary_search_by_key(&module, |(m, _)| *m) {
            Ok(at) => self.pairs[at].1 = pair,
            Err(at) => self.pairs.insert(at, (module, pair)),
        }
    }
}

/// The router's and the experts' pairs of one MoE layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ExpertLoraLayer {
    router: Option<LoraPair>,
    /// Ascending by expert, then projection.
    experts: Vec<(usize, ExpertProj, LoraPair)>,
}

impl ExpertLoraLayer {
    /// A layer of these pairs; of two for one expert's projection the later counts.
    pub fn from_pairs(
        router: Option<LoraPair>,
        experts: impl IntoIterator<Item = (usize, ExpertProj, LoraPair)>,
    ) -> Self {
        let mut experts: Vec<_> = experts.into_iter().collect();
        experts.reverse();
        experts.sort_by_key(|(expert, proj, _)| (*expert, *proj));
        experts.dedup_by_key(|(expert, proj, _)| (*expert, *proj));
        Self { router, experts }
    }

    /// The pair of a projection of `expert`; `None` where the adapter does not adapt it.
    pub fn pair(&self, expert: usize, proj: ExpertProj) -> Option<LoraPair> {
        let at = self.position(expert, proj).ok()?;
        Some(self.experts[at].2)
    }

    /// The router's pair.
    pub fn router(&self) -> Option<LoraPair> {
        self.router
    }

    /// Experts with at least one adapted projection, ascending, each once.
    pub fn adapted_experts(&self) -> impl Iterator<Item = usize> {
        self.experts
            .chunk_by(|a, b| a.0 == b.0)
            .map(|of_expert| of_expert[0].0)
    }

    /// Every adapted projection with its pair, ascending by expert, then projection.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, ExpertProj, LoraPair)> {
        self.experts.iter().copied()
    }

    /// True where neither the router nor any expert of this layer is adapted.
    pub fn is_empty(&self) -> bool {
        self.router.is_none() && self.experts.is_empty()
    }

    pub(crate) fn set_router(&mut self, pair: LoraPair) {
        self.router = Some(pair);
    }

    pub(crate) fn set(&mut self, expert: usize, proj: ExpertProj, pair: LoraPair) {
        match self.position(expert, proj) {
            Ok(at) => self.experts[at].2 = pair,
            Err(at) => self.experts.insert(at, (expert, proj, pair)),
        }
    }

    fn position(&self, expert: usize, proj: ExpertProj) -> Result<usize, usize> {
        self.experts
            .binary_search_by_key(&(expert, proj), |(n, p, _)| (*n, *p))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DevicePtr;

    fn pair(a: u64) -> LoraPair {
        LoraPair {
            a: DevicePtr(a),
            b: DevicePtr(a + 1),
            rank: 4,
            k_in: 8,
            n_out: 8,
            scale: 1.0,
            max_rank: 16,
        }
    }

    #[test]
    fn dense_pairs_are_found_by_module_whatever_the_order_they_came_in() {
        let mut layer = LoraLayerWeights::empty();
        assert!(layer.is_empty());
        layer.set(LoraModule::OProj, pair(16));
        layer.set(LoraModule::QProj, pair(32));
        assert_eq!(layer.module_pair(LoraModule::QProj), Some(pair(32)));
        assert_eq!(layer.module_pair(LoraModule::KProj), None);
        let order: Vec<_> = layer.pairs().map(|(module, _)| module).collect();
        assert_eq!(order, [LoraModule::QProj, LoraModule::OProj]);
    }

    #[test]
    fn a_layer_of_pairs_is_in_order_and_keeps_the_later_of_two() {
        let given = [
            (3, ExpertProj::Up, pair(16)),
            (1, ExpertProj::Down, pair(32)),
            (3, ExpertProj::Up, pair(48)),
        ];
        let layer = ExpertLoraLayer::from_pairs(None, given);
        assert_eq!(layer.adapted_experts().collect::<Vec<_>>(), [1, 3]);
        assert_eq!(layer.pair(3, ExpertProj::Up), Some(pair(48)));
        assert_eq!(layer.pairs().count(), 2);
    }

    #[test]
    fn an_expert_with_two_projections_is_listed_once() {
        let mut layer = ExpertLoraLayer::default();
        assert!(layer.is_empty());
        layer.set(7, ExpertProj::Down, pair(16));
        layer.set(2, ExpertProj::Up, pair(32));
        layer.set(7, ExpertProj::Gate, pair(48));
        assert_eq!(layer.adapted_experts().collect::<Vec<_>>(), [2, 7]);
        assert_eq!(layer.pair(7, ExpertProj::Gate), Some(pair(48)));
        assert_eq!(layer.pair(7, ExpertProj::Up), None);
        assert_eq!(layer.router(), None);
        layer.set_router(pair(64));
        assert!(
            !ExpertLoraLayer {
                router: layer.router(),
                ..Default::default()
            }
            .is_empty()
        );
    }
}
