//! The base model's arithmetic, in F32 and row by row.
//!
//! A blocked matrix product sums in an order that follows the batch's shape. Here a row's bits depend on the row alone, so that
//! serving a request in any batch can be compared bit for bit with serving it by itself.

use half::bf16;

/// Rows of equal width, one after the other: BF16 where a projection reads or writes them, F32 in between.
#[derive(Debug, Clone, PartialEq)]
pub struct Rows<T> {
    width: usize,
    values: Vec<T>,
}

impl<T: Copy> Rows<T> {
    /// Rows of `width` values. The values are whole rows.
    pub fn new(width: usize, values: Vec<T>) -> Self {
        debug_assert!(values.len().is_multiple_of(width));
        Self { width, values }
    }

    /// Values a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.values.len() / self.width
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// One row.
    pub fn row(&self, index: usize) -> &[T] {
        &self.values[index * self.width..][..self.width]
    }

    /// Every row in order.
    pub fn iter(&self) -> std::slice::ChunksExact<'_, T> {
        self.values.chunks_exact(self.width)
    }

    /// All values.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// All values, to change.
    pub fn values_mut(&mut self) -> &mut [T] {
        &mut self.values
    }
}

impl Rows<bf16> {
    /// F32 values, each rounded to the nearest BF16.
    pub fn rounded(width: usize, values: impl IntoIterator<Item = f32>) -> Self {
        Self::new(width, values.into_iter().map(bf16::from_f32).collect())
    }
}

/// Rounded values as F32.
pub fn widened(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

/// A linear projection without bias. The weight is `[outputs, inputs]`.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Rows<f32>,
}

impl Linear {
    /// A projection by this weight, one row an output.
    pub fn new(weight: Rows<f32>) -> Self {
        Self { weight }
    }

    /// The weight.
    pub fn weight(&self) -> &Rows<f32> {
        &self.weight
    }

    /// Outputs.
    pub fn outputs(&self) -> usize {
        self.weight.len()
    }

    /// One row's outputs.
    pub fn row<'a>(&'a self, x: &[bf16]) -> impl Iterator<Item = f32> + 'a {
        let x = widened(x);
        self.weight.iter().map(move |weight| dot(weight, &x))
    }

    /// Every row's outputs, rounded: what a delta is added to.
    pub fn forward(&self, x: &Rows<bf16>) -> Rows<bf16> {
        Rows::rounded(self.outputs(), x.iter().flat_map(|row| self.row(row)))
    }
}

/// Root-mean-square normalisation.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Vec<f32>,
    eps: f32,
}

impl RmsNorm {
    /// Normalises, then scales by `weight`.
    pub fn new(weight: Vec<f32>, eps: f32) -> Self {
        Self { weight, eps }
    }

    /// One row, or one head of a row.
    pub fn row(&self, x: &[f32]) -> impl Iterator<Item = f32> {
        let mean_square = dot(x, x) / x.len() as f32;
        let scale = (mean_square + self.eps).sqrt().recip();
        x.iter().zip(&self.weight).map(move |(x, w)| x * scale * w)
    }

    /// Every row, rounded for the projections that read it.
    pub fn forward(&self, x: &Rows<f32>) -> Rows<bf16> {
        Rows::rounded(x.width(), x.iter().flat_map(|row| self.row(row)))
    }
}

/// Rotary position embedding of the first values of each head, in Hugging Face's order: value i turns with value i + half.
#[derive(Debug, Clone)]
pub struct Rope {
    frequencies: Vec<f32>,
}

impl Rope {
    /// Turns `dims` values a head.
    pub fn new(theta: f32, dims: usize) -> Self {
        let frequency = |i: usize| theta.powf((2 * i) as f32 / dims as f32).recip();
        Self {
            frequencies: (0..dims / 2).map(frequency).collect(),
        }
    }

    /// Turns one head at `position`.
    pub fn turn(&self, head: &mut [f32], position: usize) {
        let half = self.frequencies.len();
        for (i, frequency) in self.frequencies.iter().enumerate() {
            let (sin, cos) = (position as f32 * frequency).sin_cos();
            let (a, b) = (head[i], head[i + half]);
            head[i] = a * cos - b * sin;
            head[i + half] = b * cos + a * sin;
        }
    }
}

/// Sum of products, in an order that the length alone decides.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 8;
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// Turns scores into weights that sum to 1.
pub fn softmax(scores: &mut [f32]) {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for score in scores.iter_mut() {
        *score = (*score - most).exp();
    }
    let total: f32 = scores.iter().sum();
    for score in scores {
        *score /= total;
    }
}

/// Logistic function.
pub fn sigmoid(x: f32) -> f32 {
    (1.0 + (-x).exp()).recip()
}

/// `x * sigmoid(x)`.
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `silu(gate) * up`.
pub fn gated<'a>(gate: &'a [bf16], up: &'a [bf16]) -> impl Iterator<Item = f32> + 'a {
    let pairs = gate.iter().zip(up);
    pairs.map(|(gate, up)| silu(gate.to_f32()) * up.to_f32())
}

/// Indices of the `count` largest values, largest first; of equal ones the first.
pub fn largest(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    order.truncate(count);
    order
}
